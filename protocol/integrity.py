"""Are resident bytes those that the manifest describes? Hashes every parameter where it lies, with a few threads.

Owns the one comparison of memory with a manifest's digests. Called by the process that verifies what a keeper adopts,
by clients, and by whoever writes a snapshot. Reads at memory speed and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from weightcached.protocol.manifest import Manifest, Row
from weightcached.protocol.memory.kinds import SegmentBytes

THREADS_MAX = 4


def differing_rows(manifest: Manifest, segments: Sequence[SegmentBytes]) -> list[str]:
    """Names of rows whose bytes in ``segments`` are not those of their digests, in the manifest's order; an alias is
    its target's bytes and not named. Blocks for one pass; no view of the segments is left afterwards.

    Raises TransferError for a row that lies about its shape.
    """
    return differing_among([row for row in manifest if row.alias_of is None], segments)


def differing_among(rows: Sequence[Row], segments: Sequence[SegmentBytes]) -> list[str]:
    """The same for some rows."""

    def differs(row: Row) -> bool:
        hasher = xxhash.xxh3_128()  # its `update` lets other threads run meanwhile, the one-shot function does not
        with segments[row.segment][row.offset : row.offset + row.nbytes] as data:
            hasher.update(data)
        return hasher.digest() != row.digest

    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), THREADS_MAX)) as threads:
        verdicts = threads.map(differs, rows)
        return [row.name for row, different in zip(rows, verdicts, strict=True) if different]
