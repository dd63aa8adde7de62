"""A layout that somebody else's engine makes: installed, served, attached to, refused, restarted, verified.

The engine is `tests/example_engine`, installed by pip for the session; nothing of this project knows it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import TIMEOUT_S, Daemon, daemon, supervised_daemon
from tests.support.unprivileged import ROOT
from weightcached.client import WeightSet
from weightcached.protocol.errors import CacheConfigMismatch, DaemonAbsent, DaemonFailed, InvalidOption

PACKED = ("--engine", "toy", "--", "--packing", "4")


def attached(served: Daemon, *arguments: str, **options: Any) -> WeightSet:
    from toy_engine.cached import attached

    where = {"mode": "require", "runtime_dir": served.place.runtime_dir, "timeout_s": 30.0}
    return attached(served.model_dir, arguments, **where, **options)


def run(*words: object, code: int = 0) -> str:
    """`weightcached …` to its end, which is with ``code``."""
    command = [sys.executable, "-m", "weightcached.daemon", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_what_is_served_is_what_the_engine_ends_up_with(toy: Path, runtime_dir: Path, site: Path, rank, size) -> None:
    import torch
    from toy_engine.cached import bound
    from toy_engine.engine import Options, load

    own = load(toy, Options.parse(["--packing", "4"]), rank=rank, size=size)
    with daemon(toy, runtime_dir, *PACKED, tp_rank=rank, tp_size=size) as served:
        report = served.wait_until("ready")
        assert report.layout == "toy"
        with attached(served, "--packing", "4", rank=rank, size=size) as weights:
            assert list(weights) == [
                *("embed.weight", "up.weight", "down.weight", "head.weight", "positions", "scratch", "table")
            ]
            assert weights["head.weight"] is weights["embed.weight"]
            theirs = {**dict(own.named_parameters()), **dict(own.named_buffers()), "table": own.table}
            for name, tensor in theirs.items():
                assert torch.equal(weights[name], tensor)
                assert weights[name].stride() == tensor.stride()
            assert not weights["down.weight"].is_contiguous()
            kinds = {row.name: (row.kind, row.persistent) for row in weights.manifest}
            assert kinds["scratch"] == ("buffer", False)
            assert kinds["positions"] == ("buffer", True)
            assert kinds["table"] == ("attribute", True)
            assert weights.meta.scalars == {"scale": own.scale}
            model = bound(weights, toy, ["--packing", "4"], rank=rank, size=size)
            assert model.head.weight is model.embed.weight
            tokens = torch.tensor([1, 2, 3])
            assert torch.equal(model(tokens), own(tokens))


def test_an_engine_is_started_killed_and_started_again_across_the_daemon_s_own_death(
    toy: Path, runtime_dir: Path, site: Path
) -> None:
    def engine() -> dict[str, Any]:
        command = [sys.executable, "-m", "toy_engine.cached", str(toy), str(runtime_dir), "--packing", "4"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)

    with supervised_daemon(toy, runtime_dir, *PACKED) as served:
        before = served.wait_until("ready")
        first = engine()
        assert first["generation"] == before.generation
        lines = len(served.log.lines)
        killed = served.kill_keeper()
        after = served.wait_ready_again(lines)
        assert after.pid != killed
        assert (after.generation, after.bytes_read, after.last_error) == (before.generation, 0, None)
        assert engine() == first
        stages = [record.get("stage") for record in served.log.records()]
        assert stages.count("load toy model") == 1, "it was built a second time"
        assert stages.count("ask engine toy for its key") == 1, "nothing has changed that could change its key"


def test_weights_are_kept_where_the_engine_cannot_be_asked_for_its_key(
    toy: Path, runtime_dir: Path, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package is being replaced, say: a moment like that costs no resident weight. Clients compare keys anyway."""
    monkeypatch.setenv("PYTHONPATH", str(shutil.copytree(installed, tmp_path / "site")))
    with supervised_daemon(toy, runtime_dir, *PACKED) as served:
        before = served.wait_until("ready")
        shutil.rmtree(tmp_path / "site")
        lines = len(served.log.lines)
        served.kill_keeper()
        assert served.wait_ready_again(lines).generation == before.generation
        assert "no such engine" in served.wait_logged("adopting by the options alone")["reason"]


def test_every_part_of_the_key_that_differs_is_named(
    toy: Path, runtime_dir: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon(toy, runtime_dir, *PACKED) as served:
        served.wait_until("ready")
        monkeypatch.setenv("TOY_ENGINE_REVERSED", "1")
        with pytest.raises(CacheConfigMismatch) as refused:
            attached(served, "--packing", "2")
        fields = {field.field: (field.daemon, field.client) for field in refused.value.fields}
        assert fields == {"engine.packing": (4, 2), "engine.reversed": (False, True)}
        monkeypatch.delenv("TOY_ENGINE_REVERSED")
        with attached(served, "--packing=4", "--activation", "tanh"):
            pass  # another spelling, and what does not matter to weights


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--packing", "7"), "engine_failed", "packing 7 does not divide 64 rows"),
        (("--nonsense",), "invalid_option", "unknown arguments: --nonsense"),
    ],
    ids=["while building", "in its arguments"],
)
def test_what_the_engine_raises_is_for_good_and_told_in_its_own_words(
    toy: Path, runtime_dir: Path, site: Path, arguments, code: str, words: str
) -> None:
    with daemon(toy, runtime_dir, "--engine", "toy", "--", *arguments) as served:
        report = served.wait_until("failed")
        assert report.last_error is not None
        assert report.last_error.startswith(code)
        assert words in report.last_error
        assert all(record["message"] != "loading again" for record in served.log.records())
        with pytest.raises((DaemonFailed, CacheConfigMismatch, InvalidOption)):
            attached(served, *arguments)


def test_an_engine_out_of_memory_is_tried_again(toy: Path, runtime_dir: Path, site: Path) -> None:
    with daemon(toy, runtime_dir, "--engine", "toy", "--", "--workspace-gib", "1000000") as served:
        assert "can't allocate memory" in served.wait_logged("loading again")["reason"]


def test_an_engine_that_is_not_installed_is_told_with_those_that_are(toy: Path, runtime_dir: Path, site: Path) -> None:
    with daemon(toy, runtime_dir, "--engine", "nobody") as served:
        report = served.wait_until("failed")
        assert report.last_error is not None
        assert "'nobody'" in report.last_error
        assert "toy" in report.last_error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--", "--packing", "4"), "--engine NAME is expected"),
        (("--engine", "toy", "--layout", "fused"), "--layout is not for"),
        (("--engine", "toy", "--quantization", "fp8"), "--quantization is not for"),
        (("--engine", "fused"), "is a layout, not an engine"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
@pytest.mark.parametrize("command", ["serve", "up"])
def test_options_that_contradict_each_other_are_bad_options(toy: Path, command: str, words, said: str) -> None:
    assert said in run(command, "--model", toy, *words, code=64)


def test_an_absent_daemon_is_told_whatever_the_mode_for_only_the_engine_can_load_its_layout(
    toy: Path, runtime_dir: Path, site: Path
) -> None:
    from toy_engine.cached import attached

    for mode in ("client", "require"):
        with pytest.raises(DaemonAbsent, match="toy's own loader"):
            attached(toy, mode=mode, runtime_dir=runtime_dir)
    with pytest.raises(InvalidOption):
        attached(toy, mode="off", runtime_dir=runtime_dir)


def test_verify_and_snapshots_work_with_what_the_engine_made(
    toy: Path, runtime_dir: Path, site: Path, tmp_path
) -> None:
    where = ("--runtime-dir", runtime_dir, *PACKED[:2])
    with daemon(toy, runtime_dir, *PACKED) as served:
        generation = served.wait_until("ready").generation
        run("verify", toy, *where, *PACKED[2:])
        assert "no rules for ToyForCausalLM in layout toy" in run(
            "verify", toy, *where, "--against-disk", *PACKED[2:], code=2
        )
        run("snapshot", "save", toy, tmp_path / "shots", "--cache-dir", tmp_path, *where, *PACKED[2:])
    assert "all digests right" in run("snapshot", "load", toy, tmp_path / "shots", *PACKED)
    assert "engine.packing" in run("snapshot", "load", toy, tmp_path / "shots", "--engine", "toy", code=1)
    assert "start the daemon of rank 0" in run("snapshot", "save", toy, tmp_path / "no", *where, code=1)
    with daemon(toy, runtime_dir, "--snapshot", str(tmp_path / "shots"), *PACKED) as served:
        report = served.wait_until("ready")
        assert report.generation != generation
        assert report.last_error is None
        with attached(served, "--packing", "4") as weights:
            assert weights.meta.scalars.keys() == {"scale"}
            weights.verify()
        assert all(record.get("stage") != "load toy model" for record in served.log.records())


def test_all_ranks_of_an_engine_s_layout_are_served_together(toy: Path, runtime_dir: Path, site: Path) -> None:
    from toy_engine.cached import attached

    words = ["up", "--model", toy, "--runtime-dir", runtime_dir, "--tp-size", 2, *PACKED]
    command = [sys.executable, "-m", "weightcached.daemon", *map(str, words)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as ranks:
        try:
            run("wait", "--timeout", 60, "--runtime-dir", runtime_dir, "--tp-size", 2)
            shards = []
            for rank in (0, 1):
                options = {"rank": rank, "size": 2, "mode": "require", "runtime_dir": runtime_dir}
                with attached(toy, ["--packing", "4"], **options) as weights:
                    shards.append((weights.version, bytes(weights["up.weight"].numpy())))
            assert shards[0][0] == shards[1][0]
            assert shards[0][1] != shards[1][1]
        finally:
            ranks.terminate()
    assert ranks.returncode == 0


def test_the_keeper_imports_no_engine(toy: Path, runtime_dir: Path, site: Path) -> None:
    with daemon(toy, runtime_dir, *PACKED) as served:
        served.wait_until("ready")
        maps = Path(f"/proc/{served.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert str(os.fspath(site)) not in maps
