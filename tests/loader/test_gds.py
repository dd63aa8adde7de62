"""Reading past the host's memory, with tests/fakekvikio and the driver that needs no GPU: which slabs go that way, that
their bytes and digests are those of a load as ever, and every way in which it fails.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import device_memory as memory
from tests.support.checkpoints import tiny_llama
from tests.support.execution import segment_of
from tests.support.host_pointers import HostPointers
from tests.support.resources import nothing_left_behind
from weightcached.loader import gds, pipeline
from weightcached.loader.checkpoint import Checkpoint, open_checkpoint
from weightcached.loader.device import DeviceSegments, Span
from weightcached.loader.execute import execute
from weightcached.loader.layout import Placement
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import DeploymentError, TruncatedFile

FAKE = Path(__file__).parent.parent / "fakekvikio"


def forget_kvikio() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "kvikio"]:
        del sys.modules[name]


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package in this process, anew; in the end it has no file open, and its mode is as it was."""
    forget_kvikio()
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.delenv("FAKEKVIKIO", raising=False)
    module = importlib.import_module("kvikio")
    yield module
    assert module.CuFile.open_files == 0
    assert module.defaults.get("compat_mode") is module.CompatMode.AUTO
    forget_kvikio()


@contextmanager
def opened(directory: Path, **options: Any) -> Iterator[tuple[Checkpoint, Placement]]:
    given: dict[str, Any] = {"layout": "fused", "tp_size": 1, "tp_rank": 0} | options
    config = build_config(directory, **given)
    with open_checkpoint(directory) as checkpoint:
        yield checkpoint, pipeline.prepare(checkpoint, config).placement


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path, hidden_size=256, vocab_size=4096)


def on_device(placement: Placement, files: Any, *, strategy: Any = "gds", computing: Any = None, **options: Any) -> Any:
    """(executed, the device's bytes)."""
    with memory.mapped(None, placement.nbytes) as mapped:
        segments = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)], computing=computing)
        executed = execute(placement, files, segments, strategy=strategy, **options)
        return executed, bytes(memory.read(mapped.address, placement.nbytes))


def on_host(placement: Placement, files: Any) -> Any:
    with segment_of(placement.nbytes, filled_with=b"\0") as segment:
        executed = execute(placement, files, segment)
        return executed, os.pread(segment, placement.nbytes, 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"tp_size": 2, "tp_rank": 1}, {"dtype": "float32"}, {"quantization": "fp8"}, {"quantization": "fp8-tensor"}],
    ids=str,
)
@pytest.mark.parametrize("slab_nbytes", [None, 64 << 10])
def test_bytes_and_digests_are_those_of_any_load(
    cuda_here: object, kvikio: Any, model: Path, options: dict[str, Any], slab_nbytes: int | None
) -> None:
    """Straight ranges go past the host; the rest (small, strided, cast, quantized) beside them as ever."""
    with nothing_left_behind(), opened(model, **options) as (checkpoint, placement):
        wanted, expected = on_host(placement, checkpoint.files)
        before = kvikio.CuFile.read_nbytes
        executed, found = on_device(placement, checkpoint.files, slab_nbytes=slab_nbytes, computing=HostPointers())
        assert found == expected
        assert executed.digests == wanted.digests
        assert executed.traffic == wanted.traffic
        straight = kvikio.CuFile.read_nbytes - before - gds._TRIED_NBYTES
        assert straight > 0 or "dtype" in options
        assert straight < placement.nbytes


def test_what_goes_straight_is_never_asked_of_the_page_cache_nor_staged(
    cuda_here: Any, kvikio: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the files come to the host only to be digested, out of the device."""
    monkeypatch.setattr(gds, "LEAST_NBYTES", 1)
    monkeypatch.setattr("weightcached.loader.access.Buffered.fill", None)
    monkeypatch.setattr("weightcached.loader.access.Buffered.expect", None)
    with opened(model) as (checkpoint, placement):
        on_device(placement, checkpoint.files)
        content = sum(placed.nbytes for placed in placement.placed if placed.parameter.alias_of is None)
    assert kvikio.CuFile.read_nbytes == content + gds._TRIED_NBYTES
    assert "cuMemcpyHtoDAsync" not in cuda_here.fake.calls()


def strategies(caplog: pytest.LogCaptureFixture) -> str:
    return next(record.getMessage() for record in caplog.records if record.getMessage().startswith("load strategy"))


def test_auto_takes_it_where_it_works_and_files_are_not_cached(
    cuda_here: object, kvikio: Any, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with opened(model) as (checkpoint, placement):
        on_device(placement, checkpoint.files, strategy="auto")
        assert strategies(caplog).startswith("load strategy: read: most of it lies in the page cache")
        assert kvikio.CuFile.read_nbytes == 0  # nobody had to try
        monkeypatch.setattr("weightcached.loader.access._cached_nbytes", lambda _fd: 0)
        caplog.clear()
        on_device(placement, checkpoint.files, strategy="auto")
        assert strategies(caplog).startswith(
            "load strategy: gds: GPUDirect Storage was tried on these files, and works"
        )
        assert kvikio.CuFile.read_nbytes > 0


@pytest.mark.parametrize("word", ["unavailable", "closed", "wrong"])
def test_what_does_not_work_is_said_and_auto_reads_as_ever_but_who_asked_for_it_gets_an_error(
    cuda_here: object,
    kvikio: Any,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    word: str,
) -> None:
    reasons = {"unavailable": "is not available", "closed": "NOT_SUPPORTED", "wrong": "are not the file's"}
    monkeypatch.setenv("FAKEKVIKIO", word)
    monkeypatch.setattr("weightcached.loader.access._cached_nbytes", lambda _fd: 0)
    caplog.set_level("INFO")
    with opened(model) as (checkpoint, placement):
        with nothing_left_behind(), pytest.raises(DeploymentError, match=reasons[word]) as caught:
            on_device(placement, checkpoint.files)
        assert "--load-strategy" in str(caught.value.next_step)
        caplog.clear()
        _, found = on_device(placement, checkpoint.files, strategy="auto")
        assert "not gds" in strategies(caplog)
        assert reasons[word] in strategies(caplog)
        assert found == on_host(placement, checkpoint.files)[1]


def test_without_kvikio_the_reason_is_that(cuda_here: object, model: Path) -> None:
    with opened(model) as (checkpoint, placement), pytest.raises(DeploymentError, match="kvikio cannot be imported"):
        on_device(placement, checkpoint.files)


def test_weights_in_host_memory_are_not_for_it(kvikio: Any, model: Path) -> None:
    with (
        opened(model) as (checkpoint, placement),
        segment_of(placement.nbytes) as segment,
        pytest.raises(DeploymentError, match="stay in the host's memory"),
    ):
        execute(placement, checkpoint.files, segment, strategy="gds")


def test_a_read_that_fails_names_file_and_tensor_and_nothing_is_read_in_another_way(
    cuda_here: object, kvikio: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKEKVIKIO", "failing")
    with (
        opened(model) as (checkpoint, placement),
        nothing_left_behind(),
        pytest.raises(DeploymentError, match="GPUDirect Storage cannot read tensor '") as caught,
    ):
        on_device(placement, checkpoint.files)
    assert caught.value.where == "model.safetensors"
    assert "page pinning failed" in str(caught.value.found)


def test_a_file_that_became_shorter_is_named(cuda_here: object, kvikio: Any, model: Path) -> None:
    with opened(model) as (checkpoint, placement):
        large = max(checkpoint.tensors.values(), key=lambda tensor: tensor.nbytes)
        os.truncate(model / large.file, large.offset + large.nbytes // 2)
        with nothing_left_behind(), pytest.raises(TruncatedFile):
            on_device(placement, checkpoint.files)
