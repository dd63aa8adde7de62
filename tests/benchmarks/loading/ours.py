"""Ours: the loader's pipeline, from opening the files to a sealed segment; and the content digest by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch  # before the clock starts, as with every other loader; a worker that needs it imports it as a stage

from tests.benchmarks.clock import Clock
from tests.benchmarks.page_cache import make_warm
from weightcached.loader import pipeline, snapshot
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.protocol.config import build_config
from weightcached.protocol.content import open_weights, version_of, weight_files
from weightcached.protocol.hashing import content_digest
from weightcached.protocol.memory import host
from weightcached.protocol.places import host_device
from weightcached.protocol.snapshot import MANIFEST_NAME, open_snapshot, write_snapshot
from weightcached.protocol.worker_messages import LoadStrategy

_DEVICE = host_device(tp_size=1, tp_rank=0)

torch.set_num_threads(1)  # as a worker does


def load(
    directory: str, files: Sequence[str], sample: str, layout: str, strategy: LoadStrategy = "auto"
) -> dict[str, Any]:
    """One rank of one, by a layout."""
    answer = one_rank(directory, files, layout=layout, strategy=strategy)
    return {**answer, "sample": answer["digests"][sample]}


def one_rank(
    directory: str,
    files: Sequence[str],
    layout: str = "fused",
    size: int = 1,
    rank: int = 0,
    quantization: str = "none",
    strategy: LoadStrategy = "auto",
) -> dict[str, Any]:
    """Headers, plan, memory, bytes, digests of rows, the check that nothing changed, seals: what a worker does."""
    clock, began_s = Clock(), time.perf_counter()
    model_dir = Path(directory)
    config = build_config(model_dir, layout=layout, tp_size=size, tp_rank=rank, quantization=quantization)
    with open_checkpoint(model_dir) as checkpoint:
        opened_s = time.perf_counter()
        prepared = pipeline.prepare(checkpoint, config)
        prepared_s = time.perf_counter()
        segment = host.allocate(prepared.placement.nbytes, name="benchmark")
        loaded = pipeline.load(checkpoint, prepared, segment, strategy=strategy, expendable=True)
        host.seal(segment)
    taken = clock.read()
    return {
        **taken,
        "nbytes": sum(row.nbytes for row in loaded.rows if row.alias_of is None),
        "digests": {row.name: row.digest.hex() for row in loaded.rows},
        "stages": {"open": opened_s - began_s, "plan": prepared_s - opened_s, **loaded.figures.seconds},
    }


def write_a_snapshot(directory: str, to: str) -> dict[str, Any]:
    """Of the whole model, fused, as `weightcached snapshot save` writes it. Returns its segment's path."""
    model_dir = Path(directory)
    config = build_config(model_dir, layout="fused", tp_size=1, tp_rank=0)
    with open_checkpoint(model_dir) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config)
        nbytes = prepared.placement.nbytes
        segment = host.allocate(nbytes, name="benchmark")
        loaded = pipeline.load(checkpoint, prepared, segment, expendable=True)
        receipts = checkpoint.receipts.sha256
    version = version_of(config.rankless_fingerprint, digest="0" * 64, receipts=None)
    manifest = pipeline.encode(
        loaded,
        prepared,
        generation="0" * 32,
        version=version,
        receipts_version=version_of(config.rankless_fingerprint, digest=None, receipts=receipts),
        digest="0" * 64,
    )
    mapping = host.map_readonly(segment, nbytes=nbytes)
    folder = write_snapshot(Path(to), _DEVICE, manifest=manifest, segments=[mapping.view()])
    return {"files": [str(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST_NAME]}


def from_a_snapshot(directory: str) -> dict[str, Any]:
    """The snapshot in ``directory``: its manifest, memory, bytes, digests of rows compared, seals."""
    clock = Clock()
    with open_snapshot(Path(directory), _DEVICE) as opened:
        placement = snapshot.placement_of(opened)
        segment = host.allocate(placement.nbytes, name="benchmark")
        snapshot.restore(opened, placement, segment)
        host.seal(segment)
    return {**clock.read(), "nbytes": placement.nbytes}


def content_digest_alone(directory: str) -> dict[str, Any]:
    """The digest of the whole content (BLAKE3), files in the page cache: what another process does after publishing."""
    files = weight_files(directory)
    make_warm([files.directory / name for name in files.names])
    with open_weights(files) as weights:
        began_s = time.perf_counter()
        content_digest(weights)
        return {"warm_s": time.perf_counter() - began_s}
