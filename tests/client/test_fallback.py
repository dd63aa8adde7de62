"""Loading from disk: when the contract allows it, what it tells, and that it gives the very weights a daemon gives."""

import json
import logging
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from tests.support.cgroups import memory_limit
from tests.support.checkpoints import make_checkpoint, tiny_config, tiny_llama
from tests.support.daemons import daemon, digest_of
from tests.support.forked import in_child
from tests.support.resources import nothing_left_behind
from weightcached.client import WeightSet, attach
from weightcached.protocol.errors import (
    CheckpointMismatch,
    DaemonUnreachable,
    InsufficientMemory,
    TruncatedFile,
    UnsupportedModel,
)
from weightcached.protocol.messages import Loading
from weightcached.protocol.places import Place

Attached = Callable[..., WeightSet]


@pytest.fixture(scope="module", autouse=True)
def _loader_is_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Once, before anything is counted: torch starts threads of its own at its first computation."""
    model = tiny_llama(tmp_path_factory.mktemp("first") / "model")
    attach(model, mode="off", layout="fused", quantization="fp8").close()


def fallbacks(place: Place) -> float:
    labels = {"place": str(place)}
    return REGISTRY.get_sample_value("weightcached_client_disk_fallbacks_total", labels) or 0.0


def test_an_absent_daemon_is_a_fallback_that_is_told_and_counted(
    place: Place, attached: Attached, log: pytest.LogCaptureFixture
) -> None:
    near = Place(place.runtime_dir, "other", "host-tp0of1").socket_path
    near.parent.mkdir()
    near.touch()
    before = fallbacks(place)
    with attached(mode="client") as weights:
        assert (weights.source, weights.lease) == ("disk", None)
        assert len(weights) > 0
        weights.verify()
    assert fallbacks(place) == before + 1
    warning = next(record.getMessage() for record in log.records if record.levelno == logging.WARNING)
    assert str(place.socket_path) in warning
    assert str(near) in warning


@pytest.mark.parametrize("missing", ["directory", "runtime directory"])
def test_a_missing_directory_is_absence_too(missing: str, place: Place, attached: Attached) -> None:
    place.directory.rmdir()
    if missing == "runtime directory":
        place.runtime_dir.rmdir()
    with attached(mode="client") as weights:
        assert weights.source == "disk"
    place.directory.mkdir(parents=True, exist_ok=True)


def test_a_daemon_that_died_is_no_fallback(place: Place, attached: Attached) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place.socket_path))
    before = fallbacks(place)
    with pytest.raises(DaemonUnreachable):
        attached(mode="client")
    assert fallbacks(place) == before


def test_mode_off_looks_for_no_daemon(place: Place, attached: Attached, log: pytest.LogCaptureFixture) -> None:
    place.socket_path.write_bytes(b"")  # what any other mode would raise for
    before = fallbacks(place)
    with attached(mode="off") as weights:
        assert weights.source == "disk"
    assert fallbacks(place) == before
    assert not [record for record in log.records if record.levelno >= logging.WARNING]


def test_progress_comes_from_the_disk_too(attached: Attached, model: Path) -> None:
    seen: list[Loading] = []
    with attached(mode="off", progress=seen.append) as weights:
        assert weights.resident_bytes >= (model / "model.safetensors").stat().st_size // 2
    assert seen[-1].bytes_done == seen[-1].bytes_total > 0


def test_a_progress_callback_that_raises_ends_the_load(attached: Attached) -> None:
    def give_up(_: Loading) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        attached(mode="off", progress=give_up)


def test_a_broken_checkpoint_raises_what_the_loader_raises(place: Place, model: Path, attached: Attached) -> None:
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1)
    with pytest.raises(TruncatedFile, match=r"model\.safetensors"):
        attached(mode="client")


def test_a_rank_that_the_layout_does_not_have(attached: Attached) -> None:
    with pytest.raises(UnsupportedModel, match="TP, PP and EP size 1"):
        attached(mode="off", tp_size=2, tp_rank=1)


def test_a_stated_digest_is_checked_against_the_disk(attached: Attached, model: Path, tmp_path: Path) -> None:
    right = digest_of(model)
    with attached(mode="client", digest=right, cache_dir=tmp_path / "digests") as weights:
        assert weights.version.startswith("digest:")
        assert weights.meta.digest == right
    with pytest.raises(CheckpointMismatch, match=right):
        attached(mode="client", digest="0" * 64, cache_dir=tmp_path / "digests")


def test_a_wanted_version_is_checked_against_the_disk(attached: Attached) -> None:
    with attached(mode="off") as weights:
        version = weights.version
    with attached(mode="client", want=version) as weights:
        assert weights.version == version
    with pytest.raises(CheckpointMismatch, match="not the version"):
        attached(mode="client", want="another")


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama-tied", {"layout": "hf"}),
    ("llama-sharded", {"layout": "fused", "quantization": "fp8"}),
    ("qwen2", {"layout": "fused", "tp_size": 2, "tp_rank": 1}),
    ("qwen3", {"layout": "fused", "dtype": "float32"}),
]


@pytest.mark.parametrize(("case", "options"), CASES, ids=[case for case, _ in CASES])
def test_weights_from_the_daemon_are_those_from_disk(
    case: str, options: dict[str, Any], place: Place, tmp_path: Path
) -> None:
    """Names, places, digests, forms, ties and every byte; and what one engine writes, no other sees."""
    model = make_checkpoint(tmp_path / "model", case)
    asked = {"runtime_dir": place.runtime_dir, "timeout_s": 60.0, "cache_dir": tmp_path / "digests", **options}
    with daemon(model, place.runtime_dir, **options) as served:
        served.wait_logged("listening")
        with (
            closing(attach(model, mode="require", **asked)) as cached,
            closing(attach(model, mode="require", **asked)) as other,
            closing(attach(model, mode="off", **asked)) as loaded,
        ):
            assert (cached.source, loaded.source) == ("daemon", "disk")
            assert list(cached.manifest) == list(loaded.manifest)
            assert cached.accounting == loaded.accounting
            assert cached.resident_bytes == loaded.resident_bytes
            assert cached.receipts_version == loaded.receipts_version
            for weights in (cached, loaded):
                weights.verify()
            for name in cached:
                one, two = cached[name], loaded[name]
                assert (one.dtype, one.shape, one.stride()) == (two.dtype, two.shape, two.stride())
                assert torch.equal(_bytes(one), _bytes(two))
            assert _ties(cached) == _ties(loaded)
            for tensor in cached.values():
                _bytes(tensor).fill_(0xA5)
            other.verify()
            with closing(attach(model, mode="require", **asked)) as late:
                late.verify()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


def _ties(weights: WeightSet) -> list[list[str]]:
    """Names that are one object."""
    groups: dict[int, list[str]] = {}
    for name in weights:
        groups.setdefault(id(weights[name]), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)


@pytest.mark.root
def test_a_shard_that_does_not_fit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file of 2 GiB under a cgroup's limit of 512 MiB: an error, not a kill."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_config()))
    shape = [1024, 1024 * 1024]
    header = json.dumps({"weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 2 << 30]}}).encode()
    with open(model / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (2 << 30))
    with memory_limit(512 << 20) as group:

        def work() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            with pytest.raises(InsufficientMemory, match=group.name):
                attach(model, mode="off")

        in_child(work)


def test_loading_again_and_again_leaves_nothing(model: Path) -> None:
    attach(model, mode="off").close()
    with nothing_left_behind():
        for _ in range(3):
            attach(model, mode="off").close()


def test_weights_from_disk_stay_when_the_files_are_gone(model: Path, attached: Attached) -> None:
    with attached(mode="off") as weights:
        shutil.rmtree(model)
        weights.verify()
