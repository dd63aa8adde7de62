"""What a worker fills segments from: a checkpoint, a snapshot of a finished shard, or what an engine has built.

Owns what the keeper is told of each (:class:`Planned`). Speaks to nobody; ``worker.py`` asks. An open source holds the
files it reads from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from weightcached.loader import pipeline, snapshot
from weightcached.loader.checkpoint import Checkpoint, open_checkpoint
from weightcached.loader.destination import Target
from weightcached.loader.engines.source import build_state
from weightcached.loader.execute import Progress
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.content import Receipts, open_weights, take_receipts, weight_files, weights_visible
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.kinds import kind_of
from weightcached.protocol.messages import AccountingCounts, shortened
from weightcached.protocol.ranks import device_of
from weightcached.protocol.snapshot import Snapshot, open_snapshot
from weightcached.protocol.worker_messages import Job, LoadStrategy, Planned


@dataclass(frozen=True, slots=True)
class Filled:
    """What filling the segments cost. ``encode`` makes its manifest, and takes what identifies the generation:
    ``generation``, ``version``, ``receipts_version`` and ``digest``.
    """

    bytes_read: int
    bytes_kept: int
    seconds: Mapping[str, float]
    encode: Callable[..., bytes]
    assigned_version: str | None = None
    """Of what a trainer has pushed."""


class Source(Protocol):
    """Something to load, once."""

    @property
    def segments_nbytes(self) -> tuple[int, ...]: ...

    @property
    def uses_torch(self) -> bool: ...

    buckets: Sequence[int]
    """Readable descriptors of memory that a trainer fills, which the worker puts here; most sources have none."""

    def planned(self) -> Planned:
        """What will be allocated and read, and which content it is. Reads no weight."""
        ...

    def fill(self, segments: Target, progress: Progress, strategy: LoadStrategy = "auto") -> Filled:
        """Fill the segments. Blocks. Raises what loading raises."""
        ...


@contextmanager
def source_of(job: Job, config: CacheConfig, fds: OwnedFds, stage: Callable[[str], None]) -> Iterator[Source]:
    """What the job says, open; an engine has built its state then, and has told ``stage`` how far it is. ``fds`` came
    with the job, and stay the caller's. Raises what opening it and planning for it, or building it, raise.
    """
    also_trusted = job.trusted_filesystems
    if job.push is not None:
        from weightcached.loader.pushed.source import open_push

        with open_push(job, job.push, config, fds) as pushed:
            yield pushed
        return
    if config.engine is not None and job.snapshot is None:
        yield EngineSource(job, config, stage)
        return
    if job.snapshot is None:
        with open_checkpoint(job.model_dir, also_trusted=also_trusted) as checkpoint:
            yield CheckpointSource(checkpoint, config, also_trusted)
        return
    with open_snapshot(Path(job.snapshot), device_of(config.parallel)) as opened:
        yield SnapshotSource(opened, config, _receipts_of_weights(job.model_dir, also_trusted))


class CheckpointSource:
    """A checkpoint's files: planned, cut, fused and quantized."""

    buckets: Sequence[int] = ()

    def __init__(self, checkpoint: Checkpoint, config: CacheConfig, also_trusted: Collection[str]) -> None:
        self._checkpoint = checkpoint
        self._also_trusted = also_trusted
        self._prepared = pipeline.prepare(checkpoint, config, segment_max_nbytes=kind_of(config).segment_max_nbytes)
        self.placement = self._prepared.placement
        self.segments_nbytes = self.placement.segments_nbytes
        self.uses_torch = self.placement.transforms

    def planned(self) -> Planned:
        accounting = self._prepared.plan.accounting
        return planned(
            self.segments_nbytes,
            self._checkpoint.receipts,
            bytes_to_read=sum(self._prepared.requested.values()),
            accounting=AccountingCounts(
                expected=len(accounting.expected),
                loaded=len(accounting.loaded),
                ignored=len(accounting.ignored),
                unexpected=len(accounting.unexpected),
            ),
        )

    def fill(self, segments: Target, progress: Progress, strategy: LoadStrategy = "auto") -> Filled:
        loaded = pipeline.load(
            self._checkpoint,
            self._prepared,
            segments,
            also_trusted=self._also_trusted,
            progress=progress,
            strategy=strategy,
            expendable=True,
        )
        figures, encode = loaded.figures, partial(pipeline.encode, loaded, self._prepared)
        return Filled(figures.bytes_read, figures.bytes_kept, figures.seconds, encode)


class SnapshotSource:
    """A snapshot of the finished shard. ``receipts`` are of the checkpoint's files, where they can be seen."""

    uses_torch = False

    buckets: Sequence[int] = ()

    def __init__(self, opened: Snapshot, config: CacheConfig, receipts: Receipts | None) -> None:
        opened.require_config(config)
        self._config = config
        self._snapshot = opened
        self._receipts = receipts
        self.placement = snapshot.placement_of(opened, segment_max_nbytes=kind_of(config).segment_max_nbytes)
        self.segments_nbytes = self.placement.segments_nbytes

    def planned(self) -> Planned:
        return planned(
            self.segments_nbytes,
            self._receipts,
            bytes_to_read=self._snapshot.manifest.content_nbytes,
            accounting=snapshot.counts_of(self._snapshot.manifest),
            digest=self._snapshot.digest,
        )

    def fill(self, segments: Target, progress: Progress, strategy: LoadStrategy = "auto") -> Filled:
        restored = snapshot.restore(self._snapshot, self.placement, segments, progress=progress, strategy=strategy)
        encode = partial(snapshot.encode, self._snapshot, restored, self.placement, self._config)
        return Filled(restored.bytes_read, self._snapshot.manifest.content_nbytes, restored.seconds, encode)


class EngineSource:
    """The state that an engine builds, in this process."""

    uses_torch = False
    """The engine has imported what it needs, and has set its threads."""

    buckets: Sequence[int] = ()

    def __init__(self, job: Job, config: CacheConfig, stage: Callable[[str], None]) -> None:
        os.dup2(2, 1)  # what engines print is for the log
        self._state = build_state(
            job.model_dir, config, job.engine_arguments, also_trusted=job.trusted_filesystems, progress=stage
        )
        self.segments_nbytes = (self._state.segment_nbytes,)

    def planned(self) -> Planned:
        return planned(
            self.segments_nbytes,
            self._state.receipts,
            bytes_to_read=self._state.files_nbytes,
            accounting=AccountingCounts(expected=0, loaded=0, ignored=0, unexpected=0),  # the engine's own to check
        )

    def fill(self, segments: Target, progress: Progress, strategy: LoadStrategy = "auto") -> Filled:
        encode, seconds = self._state.copy(segments, progress)
        return Filled(self._state.files_nbytes, self._state.content_nbytes, seconds, encode)


def _receipts_of_weights(model_dir: str, also_trusted: Collection[str]) -> Receipts | None:
    """So that the snapshot can be told from what lies there now, where that was digested before."""
    if not weights_visible(model_dir):
        return None
    with open_weights(weight_files(model_dir)) as weights:
        return take_receipts(weights, also_trusted=also_trusted)


def planned(
    segments_nbytes: tuple[int, ...],
    receipts: Receipts | None,
    *,
    bytes_to_read: int,
    accounting: AccountingCounts,
    digest: str | None = None,
) -> Planned:
    """What the keeper is told of a source. ``receipts`` are of the files that the weights come from."""
    return Planned(
        segments_nbytes=segments_nbytes,
        bytes_to_read=bytes_to_read,
        receipts=None if receipts is None else receipts.sha256,
        receipts_trusted=receipts is not None and receipts.trusted,
        receipts_young=receipts is not None and receipts.is_young(),
        receipts_rule="" if receipts is None else shortened(receipts.rule),
        accounting=accounting,
        digest=digest,
    )
