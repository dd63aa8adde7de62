"""Loading a snapshot: every byte where it was, every damaged one found by its parameter's name before it is of use."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.execution import segment_of
from weightcached.client import attach
from weightcached.loader.snapshot import counts_of, encode, placement_of, restore
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import SnapshotUnusable
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import Manifest, encode_manifest
from weightcached.protocol.memory import host
from weightcached.protocol.snapshot import Snapshot, open_snapshot, write_snapshot

DEVICE = "host-tp1of2"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, bytes]:
    """A snapshot's directory, and the bytes of the segment that it was made from."""
    model = tiny_llama(tmp_path / "model", vocab_size=70, tie_word_embeddings=True)
    options: dict[str, Any] = {"layout": "fused", "tp_size": 2, "tp_rank": 1, "quantization": "fp8"}
    with attach(model, mode="off", **options) as weights:
        meta = weights.manifest.meta.model_copy(update={"digest": "d" * 64})
        manifest = encode_manifest(meta, list(weights.manifest), weights.accounting)
        write_snapshot(tmp_path / "snap", DEVICE, manifest=manifest, segments=weights.memory())
        return tmp_path / "snap", bytes(weights.memory()[0])


@pytest.fixture
def opened(saved: tuple[Path, bytes]) -> Iterator[Snapshot]:
    with open_snapshot(saved[0], DEVICE) as opened:
        yield opened


def test_the_segment_is_the_one_that_was_saved(saved: tuple[Path, bytes], opened: Snapshot) -> None:
    placement, segment = placement_of(opened), saved[1]
    with OwnedFds([host.allocate(len(segment), name="test")]) as fds:
        restored = restore(opened, placement, fds[0])
        assert os.pread(fds[0], len(segment), 0) == segment
        host.seal(fds[0])  # nothing maps it any more
    assert restored.bytes_read == opened.manifest.content_nbytes
    told: dict[str, Any] = {
        "generation": "1" * 32,
        "version": "digest:1",
        "receipts_version": "digest:1",
        "digest": "d" * 64,
    }
    config = CacheConfig.model_validate(opened.manifest.meta.config)
    manifest = Manifest.decode(encode(opened, restored, placement, config, **told))
    assert list(manifest) == list(opened.manifest)
    assert manifest.accounting == opened.manifest.accounting
    assert manifest.meta.bytes_read == manifest.meta.bytes_kept == restored.bytes_read
    assert {name: getattr(manifest.meta, name) for name in told} == told
    assert manifest.meta.config == opened.manifest.meta.config
    counts = counts_of(manifest)
    assert counts.loaded == counts.expected == len(manifest.accounting.loaded) > 0


def test_each_row_is_read_in_the_order_of_the_file(opened: Snapshot) -> None:
    offsets = [placed.offset for placed in placement_of(opened).placed]
    assert offsets == sorted(offsets)
    assert len(offsets) == sum(row.alias_of is None for row in opened.manifest)


@pytest.mark.parametrize("at", [0, -1])
def test_a_flipped_bit_is_found_and_its_parameter_named(saved: tuple[Path, bytes], at: int) -> None:
    with open_snapshot(saved[0], DEVICE) as opened:
        row = opened.manifest.row("model.layers.1.mlp.down_proj.weight")
        (name,) = opened.files
        offset = row.offset + at % row.nbytes
        with open(opened.folder / name, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        with (
            segment_of(len(saved[1])) as segment,
            pytest.raises(SnapshotUnusable, match="not those that were") as caught,
        ):
            restore(opened, placement_of(opened), segment)
    assert "1 that differ: 'model.layers.1.mlp.down_proj.weight'" in str(caught.value)


def test_a_file_that_is_cut_off_while_it_is_read(saved: tuple[Path, bytes], opened: Snapshot) -> None:
    (name,) = opened.files
    os.truncate(opened.folder / name, len(saved[1]) // 2)
    with segment_of(len(saved[1])) as segment, pytest.raises(SnapshotUnusable, match="the file ends within"):
        restore(opened, placement_of(opened), segment)
