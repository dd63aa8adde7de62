"""From a snapshot to a serving daemon: the same bytes without the checkpoint, provable, and nothing wrong published."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import raw_tensor, settled, tiny_config, tiny_llama, tiny_shapes, write_checkpoint
from tests.support.daemons import Daemon, daemon, digest_of, supervised_daemon
from weightcached.client import attach
from weightcached.client.snapshot_command import main
from weightcached.protocol.digest_cache import DigestCache
from weightcached.protocol.digests import digest_of as remembered_digest_of
from weightcached.protocol.errors import CheckpointMismatch, CheckpointUnproven

OPTIONS: dict[str, Any] = {"layout": "fused", "tp_size": 2, "tp_rank": 1, "quantization": "fp8"}
WORDS = ["--layout", "fused", "--tp-size", "2", "--tp-rank", "1", "--quantization", "fp8"]


@pytest.fixture
def saved(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `snapshot save` said of the snapshot of ``model`` in ``tmp_path / "snap"``."""
    arguments = ["save", str(model), str(tmp_path / "snap"), *WORDS, "--mode", "off", "--json"]
    assert main([*arguments, "--cache-dir", str(tmp_path / "cache")]) == 0
    (said,) = json.loads(capsys.readouterr().out)["snapshots"]
    return dict(said)


@pytest.fixture
def bare(model: Path, tmp_path: Path) -> Path:
    """The model without its weights."""
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    return tmp_path / "bare"


def attached(served: Daemon, model_dir: Path, **changes: Any) -> dict[str, bytes]:
    """Name → resident bytes, as an engine gets them."""
    import torch

    options = {**OPTIONS, "mode": "require", "runtime_dir": served.place.runtime_dir, "timeout_s": 60.0, **changes}
    with attach(model_dir, cache_dir=served.place.runtime_dir / "digests", **options) as weights:
        return {
            name: tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for name, tensor in weights.items()
        }


def test_a_cold_boot_without_the_checkpoint(
    model: Path, bare: Path, saved: dict[str, Any], tmp_path: Path, runtime_dir: Path
) -> None:
    with attach(model, mode="off", **OPTIONS) as weights:
        nbytes, rows = weights.manifest.content_nbytes, list(weights.manifest)
    with daemon(bare, runtime_dir, "--snapshot", str(tmp_path / "snap"), **OPTIONS) as served:
        report = served.wait_until("ready")
        assert report.bytes_read == nbytes
        assert report.digest == saved["digest"] == digest_of(model)
        assert str(report.version).startswith("digest:")
        # Without evidence it is refused; a stated digest is evidence; files with receipts are, once they are digested.
        with pytest.raises(CheckpointUnproven):
            attached(served, bare)
        told = attached(served, bare, digest=saved["digest"])
        seen = attached(served, model)
        with attach(model, mode="off", **OPTIONS) as weights:
            assert rows == list(weights.manifest)
            assert told.keys() == seen.keys() == set(weights)
            weights.verify()
        assert told == seen
        other = another_content(tmp_path / "other")
        with pytest.raises(CheckpointMismatch):
            attached(served, other)
        assert served.report().attaches["unproven"] >= 2


def test_what_came_from_a_snapshot_outlives_its_keeper(
    bare: Path, saved: dict[str, Any], tmp_path: Path, runtime_dir: Path
) -> None:
    """The next keeper adopts it, and the digest that proves it."""
    with supervised_daemon(bare, runtime_dir, "--snapshot", str(tmp_path / "snap"), **OPTIONS) as served:
        before = served.wait_until("ready")
        first = len(served.log.lines)
        served.kill_keeper()
        after = served.wait_ready_again(first)
        assert after.generation == before.generation
        assert after.digest == saved["digest"]
        assert after.bytes_read == 0
        assert attached(served, bare, digest=saved["digest"])


def another_content(directory: Path) -> Path:
    """A checkpoint of the same configuration with one bit changed."""
    tensors = {name: raw_tensor(name, shape) for name, shape in tiny_shapes(tiny_config()).items()}
    tensors["model.norm.weight"] = raw_tensor("other.norm.weight", (32,))
    return write_checkpoint(directory, tiny_config(), {"model.safetensors": tensors})


@pytest.fixture
def remembered(runtime_dir: Path) -> Any:
    """``remembered(directory)``: the digest of its content is in the daemon's cache afterwards."""

    def run(directory: Path) -> Path:
        assert remembered_digest_of(settled(directory), DigestCache(runtime_dir / "digests")).remembered
        return directory

    return run


def test_where_the_checkpoint_is_known_its_receipts_prove_the_snapshot(
    model: Path, saved: dict[str, Any], tmp_path: Path, runtime_dir: Path, remembered: Any
) -> None:
    remembered(model)
    with daemon(model, runtime_dir, "--snapshot", str(tmp_path / "snap"), **OPTIONS) as served:
        served.wait_until("ready")
        attached(served, model)
        assert served.report().attaches == {"granted": 1}


def test_a_snapshot_of_another_content_than_is_known_to_be_there(
    saved: dict[str, Any], tmp_path: Path, runtime_dir: Path, remembered: Any
) -> None:
    other = remembered(another_content(tmp_path / "other"))
    with daemon(other, runtime_dir, "--snapshot", str(tmp_path / "snap"), **OPTIONS) as served:
        report = served.wait_until("failed")
        assert str(report.last_error).startswith("snapshot_mismatch:")
        assert saved["digest"] in str(report.last_error)


def flip(folder: Path) -> None:
    (path,) = (path for path in folder.iterdir() if path.name != "manifest")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def cut(folder: Path) -> None:
    (path,) = (path for path in folder.iterdir() if path.name != "manifest")
    path.write_bytes(path.read_bytes()[:-1])


def tear(folder: Path) -> None:
    path = folder / "manifest"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "code", "needle"),
    [
        (flip, "snapshot_unusable", "1 that differ: 'model.embed_tokens.weight'"),
        (cut, "snapshot_unusable", "segment 0 is not whole"),
        (tear, "snapshot_unusable", "damaged or torn"),
        (shutil.rmtree, "snapshot_unusable", "no snapshot of this rank"),
    ],
)
def test_a_damaged_snapshot_is_a_failed_load_with_its_reason(
    bare: Path, saved: dict[str, Any], tmp_path: Path, runtime_dir: Path, damage: Any, code: str, needle: str
) -> None:
    damage(Path(saved["path"]))
    with daemon(bare, runtime_dir, "--snapshot", str(tmp_path / "snap"), **OPTIONS) as served:
        report = served.wait_until("failed")
        assert str(report.last_error).startswith(f"{code}:")
        assert needle in str(report.last_error)
        assert report.generation is None
        assert sum(record.get("stage") == "start worker" for record in served.log.records()) == 1


def test_another_configuration_is_a_failed_load_that_names_the_field(
    bare: Path, saved: dict[str, Any], tmp_path: Path, runtime_dir: Path
) -> None:
    options = {**OPTIONS, "dtype": "float16"}
    with daemon(bare, runtime_dir, "--snapshot", str(tmp_path / "snap"), **options) as served:
        error = str(served.wait_until("failed").last_error)
        assert error.startswith("snapshot_mismatch:")
        assert "dtype: it has 'auto', 'float16' is asked for" in error


class TestCommand:
    @pytest.fixture
    def snap(self, tmp_path: Path) -> Path:
        return tmp_path / "snap"

    @pytest.fixture
    def said(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, runtime_dir: Path) -> Any:
        def run(command: str, *arguments: object) -> tuple[int, str]:
            place = ["--cache-dir", str(tmp_path / "cache"), "--runtime-dir", str(runtime_dir)]
            code = main([command, *map(str, arguments), *(place if command == "save" else [])])
            return code, capsys.readouterr().out

        return run

    def test_save_takes_what_daemons_serve_and_load_tries_it(
        self, model: Path, runtime_dir: Path, snap: Path, said: Any
    ) -> None:
        with daemon(model, runtime_dir, layout="fused") as served:
            served.wait_until("ready")
            code, output = said("save", model, snap, "--layout", "fused")
            assert code == 0
            assert "from the daemon" in output
        code, output = said("load", model, snap, "--layout", "fused", "--json")
        assert code == 0
        (loaded,) = json.loads(output)["snapshots"]
        assert loaded["digest"] == digest_of(model)
        assert loaded["path"] == str(snap / "host-tp0of1")

    def test_all_ranks_are_saved_side_by_side(self, model: Path, snap: Path, said: Any) -> None:
        assert said("save", model, snap, "--layout", "fused", "--tp-size", 2)[0] == 0
        assert sorted(path.name for path in snap.iterdir()) == ["host-tp0of2", "host-tp1of2"]
        assert said("load", model, snap, "--layout", "fused", "--tp-size", 2)[0] == 0

    def test_exit_codes(self, tmp_path: Path, snap: Path, said: Any) -> None:
        model = tiny_llama(tmp_path / "own")
        code, output = said("save", model, snap, "--mode", "require", "--json")
        assert code == 1
        assert json.loads(output)["error"]["code"] == "daemon_absent"
        assert not snap.exists()
        assert said("load", model, snap) == (1, "")
        assert said("load", model, snap, "--tp-size", 2, "--tp-rank", 2) == (64, "")
        assert said("save", model, snap)[0] == 0
        code, output = said("load", model, snap, "--dtype", "float32", "--json")
        assert code == 1
        assert json.loads(output)["error"]["code"] == "snapshot_mismatch"
        with pytest.raises(SystemExit) as caught:
            main([])
        assert caught.value.code == 64
        tiny_llama(model, num_hidden_layers=1)
        code, output = said("save", model, snap, "--digest", "0" * 64, "--json")
        assert code == 1
        assert json.loads(output)["error"]["code"] == "content_mismatch"
        (model / "config.json").unlink()
        assert said("load", model, snap)[0] == 1
