"""Executing load plans for tests: with real files and a real memfd, and looking at what is in it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from tests.support import naive
from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.layout import Placement
from weightcached.protocol.config import build_config
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import Row
from weightcached.protocol.memory import host


@contextmanager
def segment_of(nbytes: int, *, filled_with: bytes = b"\xa5") -> Iterator[int]:
    """A writable memfd whose every byte is ``filled_with``: what nobody writes shows."""
    with OwnedFds([host.allocate(nbytes, name="test")]) as fds:
        step = 1 << 20
        for offset in range(0, nbytes, step):
            with open(f"/proc/self/fd/{fds[0]}", "r+b", buffering=0) as file:
                file.seek(offset)
                file.write(filled_with * min(step, nbytes - offset))
        yield fds[0]


def resident(segment: int, placement: Placement) -> dict[str, bytes]:
    """Parameter name → its bytes in the segment."""
    with open(f"/proc/self/fd/{segment}", "rb", buffering=0) as file:
        data = file.read(placement.nbytes) if placement.nbytes else b""
    return {placed.parameter.name: data[placed.offset : placed.offset + placed.nbytes] for placed in placement.placed}


@dataclass(frozen=True)
class Outcome:
    """A whole load: what came of it, and every parameter's bytes."""

    prepared: pipeline.Prepared
    loaded: pipeline.Loaded
    data: Mapping[str, bytes]

    @property
    def rows(self) -> dict[str, Row]:
        return {row.name: row for row in self.loaded.rows}

    def array(self, name: str) -> np.ndarray:
        row = self.rows[name]
        return np.frombuffer(self.data[name], naive.numpy_dtype(row.dtype)).reshape(row.shape)


def load(directory: Path, **options: object) -> Outcome:
    """Load one rank through the pipeline. ``options`` are those of ``build_config``, and ``expendable``."""
    expendable = bool(options.pop("expendable", False))
    config = build_config(directory, **options)  # type: ignore[arg-type]
    with open_checkpoint(directory) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config)
        with segment_of(prepared.placement.nbytes) as segment:
            loaded = pipeline.load(checkpoint, prepared, segment, expendable=expendable)
            data = resident(segment, prepared.placement)
    for row in loaded.rows:
        assert row.digest == xxhash.xxh3_128(data[row.name]).digest(), row.name
    return Outcome(prepared, loaded, data)
