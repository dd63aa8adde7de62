"""Loading a snapshot: every parameter's bytes straight from the snapshot's files to their places in the segments.

Owns making an execution of it (each row is one plain copy), checking every row's digest before anything is published,
and the manifest of what was loaded. The files are ``protocol/snapshot.py``'s, the reading is the executor's: a snapshot
is read like a checkpoint whose tensors are finished, in the order of their places.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weightcached.loader.boxes import whole
from weightcached.loader.destination import Target
from weightcached.loader.execute import Executed, Progress, execute
from weightcached.loader.layout import Placed, Placement, Places
from weightcached.loader.planned import Copy, PlannedParameter, TensorHeader
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import SnapshotUnusable, TruncatedFile
from weightcached.protocol.manifest import Manifest, Row, encode_manifest
from weightcached.protocol.messages import AccountingCounts
from weightcached.protocol.snapshot import Snapshot
from weightcached.protocol.text import shown
from weightcached.protocol.worker_messages import LoadStrategy

_DTYPE = "uint8"
_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Restored:
    """What loading cost, beside the filled segment."""

    seconds: Mapping[str, float]
    bytes_read: int


def placement_of(snapshot: Snapshot, segment_max_nbytes: int | None = None) -> Placement:
    """Every row as so many bytes of the snapshot's files, in the order in which they lie there, and with a place as a
    load of the checkpoint gives it: the snapshot may have been saved from memory with smaller or larger segments.

    Raises UnsupportedModel as ``Places.take``.
    """
    places, files = Places(segment_max_nbytes), list(snapshot.files)
    rows = sorted((row for row in snapshot.manifest if row.alias_of is None), key=lambda row: (row.segment, row.offset))
    placed = tuple(_placed(row, files[row.segment], *places.take(row.name, row.nbytes)) for row in rows)
    return Placement(placed, places.segments_nbytes)


def _placed(row: Row, file: str, segment: int, offset: int) -> Placed:
    shape = (row.nbytes,)
    tensor = TensorHeader(row.name, _DTYPE, shape, file, row.offset, row.nbytes)
    copies = (Copy(tensor, whole(shape), whole(shape)),) if row.nbytes else ()
    return Placed(PlannedParameter(row.name, shape, _DTYPE, _DTYPE, copies), segment, offset, row.nbytes)


def restore(
    snapshot: Snapshot,
    placement: Placement,
    segments: Target,
    *,
    progress: Progress | None = None,
    strategy: LoadStrategy = "auto",
) -> Restored:
    """Fill ``segments``, of the placement's sizes, whose bytes are zeros or become them. Blocks.

    Raises SnapshotUnusable naming the parameters whose bytes are not those that were written, or that cannot be read;
    InsufficientMemory; and what ``progress`` raises. The segments are of use only if this returns.
    """
    started_s = time.perf_counter()
    try:
        executed = execute(placement, snapshot.files, segments, strategy=strategy, progress=progress)
    except TruncatedFile as error:
        raise SnapshotUnusable(
            error.message, expected=error.expected, found=error.found, where=snapshot.folder
        ) from error
    _require_digests(snapshot, executed)
    bytes_read = sum(traffic.read for traffic in executed.traffic.values())
    return Restored({"load": time.perf_counter() - started_s}, bytes_read)


def _require_digests(snapshot: Snapshot, executed: Executed) -> None:
    rows = (row for row in snapshot.manifest if row.alias_of is None)
    differing = [row.name for row in rows if executed.digests[row.name] != row.digest]
    if differing:
        raise SnapshotUnusable(
            "the snapshot's bytes are not those that were written",
            expected=f"{len(executed.digests)} parameters with the digests of its manifest",
            found=f"{len(differing)} that differ: {', '.join(shown(name) for name in differing[:_NAMES_SHOWN])}",
            where=snapshot.folder,
            next_step="make it again with `weightcached snapshot save`, or load without --snapshot",
        )


def counts_of(manifest: Manifest) -> AccountingCounts:
    """How many checkpoint tensors became what, when the snapshot's weights were first loaded."""
    accounting = manifest.accounting
    return AccountingCounts(
        expected=len(accounting.expected),
        loaded=len(accounting.loaded),
        ignored=len(accounting.ignored),
        unexpected=len(accounting.unexpected),
    )


def encode(
    snapshot: Snapshot,
    restored: Restored,
    placement: Placement,
    config: CacheConfig,
    *,
    generation: str,
    version: str,
    receipts_version: str,
    digest: str | None,
) -> bytes:
    """The manifest of what was loaded: the snapshot's, as another generation, with what this load read and where it
    put it; ``config`` is the snapshot's, but for the memory that the bytes are in now.
    """
    manifest = snapshot.manifest
    meta = manifest.meta.model_copy(
        update={
            "generation": generation,
            "version": version,
            "receipts_version": receipts_version,
            "digest": digest,
            "fingerprint": config.fingerprint,
            "config": config.model_dump(),
            "segments_nbytes": placement.segments_nbytes,
            "bytes_read": restored.bytes_read,
            "bytes_kept": manifest.content_nbytes,
            "seconds": dict(restored.seconds),
        }
    )
    placed = {one.parameter.name: one for one in placement.placed}
    return encode_manifest(
        meta, [_moved(row, placed[row.alias_of or row.name]) for row in manifest], manifest.accounting
    )


def _moved(row: Row, placed: Placed) -> Row:
    return replace(row, segment=placed.segment, offset=placed.offset)
