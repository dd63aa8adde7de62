"""A shard in several segments: the same bytes under the same names, whatever fills them and in whatever memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import device_memory as memory
from tests.support.checkpoints import tiny_llama
from tests.support.execution import load, segment_of
from tests.support.resources import nothing_left_behind
from weightcached.client import attach
from weightcached.loader import pipeline, snapshot
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.device import DeviceSegments, Span
from weightcached.loader.layout import Placement
from weightcached.loader.verify import verify
from weightcached.protocol.config import CacheConfig, build_config
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import Manifest, encode_manifest
from weightcached.protocol.memory import host
from weightcached.protocol.snapshot import open_snapshot, write_snapshot

MOST = 10 << 10
"""Of the tiny model's largest parameters one fits, and not two."""
VERSIONS: dict[str, Any] = {
    "generation": "1" * 32,
    "version": "digest:1",
    "receipts_version": "digest:1",
    "digest": "d" * 64,
}
WAYS = [
    {"layout": "hf"},
    {"layout": "fused", "tp_size": 2, "tp_rank": 1},
    {"layout": "fused", "quantization": "fp8-tensor"},
    {"layout": "fused", "quantization": "int4-asym=8"},
]


@contextmanager
def segments_of(sizes: Sequence[int]) -> Iterator[list[int]]:
    """A writable memfd for each size, full of something else."""
    with ExitStack() as held:
        yield [held.enter_context(segment_of(nbytes)) for nbytes in sizes]


def resident(segments: Sequence[int], placement: Placement) -> dict[str, bytes]:
    """Parameter → its bytes."""
    return {
        placed.parameter.name: os.pread(segments[placed.segment], placed.nbytes, placed.offset)
        for placed in placement.placed
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model", tie_word_embeddings=True)


def options(way: dict[str, Any]) -> dict[str, Any]:
    return {"tp_size": 1, "tp_rank": 0} | way


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_parameter_has_the_bytes_and_the_digest_of_a_load_into_one(model: Path, way: dict[str, Any]) -> None:
    wanted = load(model, **options(way))
    config = build_config(model, **options(way))
    with nothing_left_behind(), open_checkpoint(model) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config, segment_max_nbytes=MOST)
        sizes = prepared.placement.segments_nbytes
        assert len(sizes) > 2
        with segments_of(sizes) as segments:
            loaded = pipeline.load(checkpoint, prepared, segments)
            assert resident(segments, prepared.placement) == wanted.data
    assert {row.name: row.digest for row in loaded.rows} == {name: row.digest for name, row in wanted.rows.items()}
    manifest = Manifest.decode(pipeline.encode(loaded, prepared, **VERSIONS))
    assert manifest.meta.segments_nbytes == sizes
    assert {row.segment for row in manifest} == set(range(len(sizes)))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_device_is_filled_with_the_same(cuda_here: object, model: Path, way: dict[str, Any]) -> None:
    """Rings of rooms are used again while threads go from one segment to the next, and gaps become zeros in each."""
    config = build_config(model, **options(way))
    with open_checkpoint(model) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config, segment_max_nbytes=MOST)
        sizes = prepared.placement.segments_nbytes
        with segments_of(sizes) as segments, ExitStack() as held:
            wanted = pipeline.load(checkpoint, prepared, segments)
            mapped = [held.enter_context(memory.mapped(None, nbytes)) for nbytes in sizes]
            spans = [Span(one.address, one.nbytes) for one in mapped]
            loaded = pipeline.load(checkpoint, prepared, DeviceSegments(mapped[0].context, spans))
            for placed in prepared.placement.placed:
                found = memory.read(mapped[placed.segment].address + placed.offset, placed.nbytes)
                assert found == os.pread(segments[placed.segment], placed.nbytes, placed.offset)
            for one, nbytes in zip(mapped, sizes, strict=True):
                assert not any(memory.read(one.address + nbytes, one.nbytes - nbytes))
    assert loaded.rows == wanted.rows


@pytest.mark.parametrize("saved_with", [None, MOST])
@pytest.mark.parametrize("loaded_with", [None, MOST])
def test_a_snapshot_has_the_places_of_the_memory_that_it_is_loaded_into(
    tmp_path: Path, model: Path, saved_with: int | None, loaded_with: int | None
) -> None:
    """As a load of the checkpoint into the same memory: swaps at stable addresses do not ask where weights are from."""
    config = build_config(model, **options({"layout": "fused"}))
    with open_checkpoint(model) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config, segment_max_nbytes=saved_with)
        wanted = pipeline.prepare(checkpoint, config, segment_max_nbytes=loaded_with).placement
        with segments_of(prepared.placement.segments_nbytes) as segments:
            loaded = pipeline.load(checkpoint, prepared, segments)
            expected = resident(segments, prepared.placement)
            manifest = pipeline.encode(loaded, prepared, **VERSIONS)
            sizes = prepared.placement.segments_nbytes
            data = [memoryview(os.pread(fd, nbytes, 0)) for fd, nbytes in zip(segments, sizes, strict=True)]
            write_snapshot(tmp_path / "snap", "host-tp0of1", manifest=manifest, segments=data)
    with nothing_left_behind(), open_snapshot(tmp_path / "snap", "host-tp0of1") as opened:
        placement = snapshot.placement_of(opened, loaded_with)
        assert placement.segments_nbytes == wanted.segments_nbytes
        with segments_of(placement.segments_nbytes) as segments:
            restored = snapshot.restore(opened, placement, segments)
            made = Manifest.decode(snapshot.encode(opened, restored, placement, config, **VERSIONS))
            for row, placed in zip(made, wanted.placed, strict=True):
                assert (row.name, row.segment, row.offset) == (placed.parameter.name, placed.segment, placed.offset)
                assert os.pread(segments[row.segment], row.nbytes, row.offset) == expected[row.name]


def test_the_process_that_verifies_looks_into_each(model: Path) -> None:
    config = build_config(model, **options({"layout": "hf"}))
    with open_checkpoint(model) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config, segment_max_nbytes=MOST)
        with OwnedFds() as fds:
            fds.extend(host.allocate(nbytes, name="test") for nbytes in prepared.placement.segments_nbytes)
            loaded = pipeline.load(checkpoint, prepared, list(fds))
            last = loaded.rows[-1]
            os.pwrite(fds[last.segment], b"\xff\xff", last.offset)
            manifest = pipeline.encode(loaded, prepared, **VERSIONS)
            fds.append(host.allocate(len(manifest), name="test"))
            os.pwrite(fds[len(fds) - 1], manifest, 0)
            for fd in fds:
                host.seal(fd)
            *segments, manifest_fd = fds
            found = verify(manifest_fd, segments)
    assert found["differing"] == [last.name]
    assert found["rows"] == sum(row.alias_of is None for row in loaded.rows)


def test_a_client_that_loads_from_disk_has_them_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "segment_max_nbytes", MOST)
    with attach(model, mode="off") as weights:
        several = {name: bytes(tensor.view(-1).view(_uint8()).numpy()) for name, tensor in weights.items()}
        assert len(weights.memory()) > 2
        assert weights.differing() == []
        tied = [weights[name] for name in ("lm_head.weight", "model.embed_tokens.weight") if name in weights]
        assert len({id(tensor) for tensor in tied}) == 1
        config = CacheConfig.model_validate(weights.meta.config)
        resaved = Manifest.decode(encode_manifest(weights.meta, list(weights.manifest), weights.accounting))
        assert resaved.meta.segments_nbytes == weights.meta.segments_nbytes
    monkeypatch.undo()
    with attach(model, mode="off") as weights:
        assert several == {name: bytes(tensor.view(-1).view(_uint8()).numpy()) for name, tensor in weights.items()}
        assert config.fingerprint == weights.meta.fingerprint


def _uint8() -> Any:
    import torch

    return torch.uint8
