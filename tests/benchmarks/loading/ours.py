"""Ours: the loader's pipeline, from opening the checkpoint to a sealed segment; and the content digest by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.clock import Clock
from tests.benchmarks.page_cache import make_warm
from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.protocol.config import build_config
from weightcached.protocol.content import open_weights, weight_files
from weightcached.protocol.hashing import content_digest
from weightcached.protocol.memory import host


def load(directory: str, files: Sequence[str], sample: str, layout: str) -> dict[str, Any]:
    """Headers, plan, memory, bytes, digests of rows, the check that nothing changed, seals: what a worker does."""
    clock, began_s = Clock(), time.perf_counter()
    model_dir = Path(directory)
    config = build_config(model_dir, layout=layout, tp_size=1, tp_rank=0)
    with open_checkpoint(model_dir) as checkpoint:
        opened_s = time.perf_counter()
        prepared = pipeline.prepare(checkpoint, config)
        prepared_s = time.perf_counter()
        segment = host.allocate(prepared.placement.segment_nbytes, name="benchmark")
        loaded = pipeline.load(checkpoint, prepared, segment)
        host.seal(segment)
    taken = clock.read()
    (row,) = (row for row in loaded.rows if row.name == sample)
    return {
        **taken,
        "nbytes": sum(row.nbytes for row in loaded.rows if row.alias_of is None),
        "sample": row.digest.hex(),
        "stages": {"open": opened_s - began_s, "plan": prepared_s - opened_s, **loaded.figures.seconds},
    }


def content_digest_alone(directory: str) -> dict[str, Any]:
    """The digest of the whole content (BLAKE3), files in the page cache: what another process does after publishing."""
    files = weight_files(directory)
    make_warm([files.directory / name for name in files.names])
    with open_weights(files) as weights:
        began_s = time.perf_counter()
        content_digest(weights)
        return {"warm_s": time.perf_counter() - began_s}
