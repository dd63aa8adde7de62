"""The pipeline: from an open checkpoint to filled memory, manifest rows and figures.

Owns the order plan → place → execute → check that nothing changed → manifest, and what a load is measured by. Used by
the worker, for memory that will be published, and by the client's disk fallback, in its own process and memory. Speaks
to nobody.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from weightcached.loader.checkpoint import Checkpoint
from weightcached.loader.collector import collector_paused
from weightcached.loader.destination import Target
from weightcached.loader.execute import Executed, Progress, Traffic, execute
from weightcached.loader.layout import Placed, Placement, place
from weightcached.loader.plan import make_plan
from weightcached.loader.planned import LoadPlan, PartKind, TensorHeader
from weightcached.loader.reading import requested_nbytes
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.content import take_receipts
from weightcached.protocol.manifest import ManifestMeta, NameAccounting, Row, contiguous_stride, encode_manifest
from weightcached.protocol.worker_messages import LoadStrategy


@dataclass(frozen=True, slots=True)
class Prepared:
    """What headers alone decide: the plan, every parameter's place, and how much will be read."""

    plan: LoadPlan
    headers: Mapping[str, TensorHeader]
    placement: Placement
    requested: Mapping[PartKind, int]
    """Bytes of the files that this rank will ask for, by part kind; gaps read through are counted."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a load cost. ``seconds`` is by stage; digests of rows are part of ``load``."""

    seconds: Mapping[str, float]
    requested: Mapping[PartKind, int]
    traffic: Mapping[PartKind, Traffic]

    @property
    def bytes_requested(self) -> int:
        return sum(self.requested.values())

    @property
    def bytes_read(self) -> int:
        """What system calls returned: page cache or disk."""
        return sum(traffic.read for traffic in self.traffic.values())

    @property
    def bytes_kept(self) -> int:
        """The checkpoint's bytes that became part of a parameter."""
        return sum(traffic.kept for traffic in self.traffic.values())


@dataclass(frozen=True, slots=True)
class Loaded:
    """The filled segments' rows, in the plan's order, and the figures."""

    rows: tuple[Row, ...]
    figures: Figures


def prepare(checkpoint: Checkpoint, config: CacheConfig, *, segment_max_nbytes: int | None = None) -> Prepared:
    """Plan and place, in segments of at most so many bytes. Reads nothing but what ``checkpoint`` already holds. Raises
    what ``make_plan`` and ``place`` raise.
    """
    with collector_paused():
        plan = make_plan(checkpoint.tensors, checkpoint.config, config)
        return Prepared(plan, checkpoint.tensors, place(plan, segment_max_nbytes), requested_nbytes(plan))


def load(
    checkpoint: Checkpoint,
    prepared: Prepared,
    segments: Target,
    *,
    also_trusted: Collection[str] = (),
    progress: Progress | None = None,
    strategy: LoadStrategy = "auto",
    expendable: bool = False,
) -> Loaded:
    """Fill ``segments``, of ``prepared.placement.segments_nbytes`` bytes, from the checkpoint.

    Blocks. Descriptors stay the caller's, are not mapped here, and are of use only if this returns: a failure leaves
    them half filled. ``expendable`` as in ``execute``. Raises CheckpointChanged when a file is not what it was when the
    checkpoint was opened, another CheckpointError when one cannot be read or used, InsufficientMemory, and what
    ``progress`` raises.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        executed = execute(
            prepared.placement,
            checkpoint.files,
            segments,
            strategy=strategy,
            progress=progress,
            expendable=expendable,
        )
    with _timed(seconds, "verify"):
        checkpoint.receipts.require_same(take_receipts(checkpoint.files, also_trusted=also_trusted))
    rows = tuple(row_of(placed, executed) for placed in prepared.placement.placed)
    return Loaded(rows, Figures(seconds, prepared.requested, executed.traffic))


def encode(
    loaded: Loaded, prepared: Prepared, *, generation: str, version: str, receipts_version: str, digest: str | None
) -> bytes:
    """The manifest of what was loaded. ``digest`` is the content digest where it is known already."""
    plan, figures = prepared.plan, loaded.figures
    meta = ManifestMeta(
        generation=generation,
        version=version,
        receipts_version=receipts_version,
        fingerprint=plan.config.fingerprint,
        config=plan.config.model_dump(),
        digest=digest,
        segments_nbytes=prepared.placement.segments_nbytes,
        bytes_read=figures.bytes_read,
        bytes_kept=figures.bytes_kept,
        seconds=dict(figures.seconds),
    )
    accounting = NameAccounting(
        expected=tuple(sorted(plan.accounting.expected)),
        loaded=tuple(sorted(plan.accounting.loaded)),
        ignored=plan.accounting.ignored,
        unexpected=tuple(sorted(plan.accounting.unexpected)),
    )
    return encode_manifest(meta, loaded.rows, accounting)


def row_of(placed: Placed, executed: Executed) -> Row:
    """The manifest's row of a parameter that has been filled."""
    parameter = placed.parameter
    return Row(
        name=parameter.name,
        segment=placed.segment,
        offset=placed.offset,
        nbytes=placed.nbytes,
        shape=parameter.shape,
        stride=contiguous_stride(parameter.shape),
        dtype=parameter.dtype,
        digest=executed.digests[parameter.name],
        kind=parameter.kind,
        persistent=parameter.persistent,
        alias_of=parameter.alias_of,
    )


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started_s = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - started_s
