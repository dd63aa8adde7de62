"""A trainer as a source of a worker's job: planned from the headers of the checkpoint that the daemon was started for.

Owns what comes with the job: the socket to the trainer and the generation that is served. Everything about a parameter
but its bytes is as in a load of the checkpoint, so a pushed generation takes the place of a loaded one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.destination import Target
from weightcached.loader.execute import Progress
from weightcached.loader.pipeline import Figures, Loaded, Prepared, row_of
from weightcached.loader.pushed.base import Base
from weightcached.loader.pushed.serve import Trainer
from weightcached.loader.pushed.wanted import pushables
from weightcached.loader.sources import Filled, planned
from weightcached.protocol.assigned import is_assigned, resident_digest
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import CheckpointError, ProtocolError, UnsupportedModel, UnusableValue
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import MANIFEST_MAX_BYTES, Manifest
from weightcached.protocol.memory import host
from weightcached.protocol.memory.kinds import kind_of
from weightcached.protocol.messages import AccountingCounts
from weightcached.protocol.worker_messages import Job, LoadStrategy, Planned, Push


@contextmanager
def open_push(job: Job, push: Push, config: CacheConfig, fds: OwnedFds) -> Iterator[PushedSource]:
    """The source. ``fds`` are the job's and stay the caller's, but for the socket. Reads headers and the manifest.

    Raises UnsupportedModel, PushMismatch, TransferError, and a CheckpointError where the headers cannot be had.
    """
    if config.engine is not None:
        raise UnsupportedModel(
            f"layout {config.layout!r} is made by an engine, which alone knows where a tensor goes",
            expected="layout hf or fused",
            found=config.layout,
            next_step="push to daemons of --layout fused, or write a checkpoint and `weightcached update`",
        )
    if len(fds) < 2:
        raise ProtocolError("a push came without its socket and manifest", expected="2 descriptors", found=len(fds))
    with closing(socket.socket(fileno=fds.take(0))) as connection:
        prepared = _prepared(job, config)
        segments = [fds[position] for position in range(2, len(fds))]
        with Base(_manifest(fds[1]), config, segments) as base:
            base.require_same_layout(prepared.placement, config, model_dir=job.model_dir)
            yield PushedSource(connection, prepared, base, push)


def _prepared(job: Job, config: CacheConfig) -> Prepared:
    try:
        with open_checkpoint(job.model_dir, also_trusted=job.trusted_filesystems) as checkpoint:
            return pipeline.prepare(checkpoint, config, segment_max_nbytes=kind_of(config).segment_max_nbytes)
    except CheckpointError as error:
        raise CheckpointError(
            "what is pushed is planned from the headers of the daemon's checkpoint, which cannot be had",
            found=f"{error.code}: {error}",
            where=job.model_dir,
            next_step="put the checkpoint back in its place; its weights are not read",
        ) from error


def _manifest(fd: int) -> Manifest:
    nbytes = os.fstat(fd).st_size
    if nbytes > MANIFEST_MAX_BYTES:
        raise ProtocolError("the manifest is too large", expected=MANIFEST_MAX_BYTES, found=nbytes)
    host.verify(fd, nbytes=nbytes, what="the manifest")
    return Manifest.decode(os.pread(fd, nbytes, 0))


class PushedSource:
    """``base``: what is served, and kept where nothing is pushed in a partial push."""

    def __init__(self, connection: socket.socket, prepared: Prepared, base: Base, push: Push) -> None:
        plan = prepared.plan
        self._prepared = prepared
        self._base = base
        self._push = push
        self._table = pushables(prepared.placement, prepared.headers)
        self._trainer = Trainer(connection, self._table)
        self.segments_nbytes = prepared.placement.segments_nbytes
        self.uses_torch = prepared.placement.transforms
        self.buckets: Sequence[int] = ()
        """Readable descriptors, from whoever was given them; they have to be there before :meth:`fill`."""
        self._accounting = plan.accounting

    def planned(self) -> Planned:
        accounting = self._accounting
        return planned(
            self.segments_nbytes,
            None,
            bytes_to_read=sum(one.nbytes for one in self._table),
            accounting=AccountingCounts(
                expected=len(accounting.expected),
                loaded=len(accounting.loaded),
                ignored=len(accounting.ignored),
                unexpected=len(accounting.unexpected),
            ),
        )

    def fill(self, segments: Target, progress: Progress, strategy: LoadStrategy = "auto") -> Filled:
        started_s = time.perf_counter()
        try:
            received = self._trainer.receive(
                self._prepared.placement,
                segments,
                self.buckets,
                bucket_nbytes=self._push.bucket_nbytes,
                base=self._base if self._push.partial else None,
                progress=progress,
            )
        except UnusableValue as error:
            error.next_step = "mend that tensor at the trainer, and push again: what is served has not changed"
            raise
        rows = tuple(row_of(placed, received.executed) for placed in self._prepared.placement.placed)
        seconds = {"push": time.perf_counter() - started_s}
        resident, before = resident_digest(rows), self._base.version
        unchanged = resident == resident_digest(self._base.rows.values())
        version = self._trainer.assigned(resident, received, unchanged=unchanged)
        if not (unchanged if version == before else is_assigned(version)):
            raise ProtocolError(
                "the trainer assigned a version that is not of what it has pushed",
                expected=f"one made of it{f', or {before}, since nothing changed' if unchanged else ''}",
                found=version,
            )
        loaded = Loaded(rows, Figures(seconds, {}, {}))
        return Filled(
            0,
            received.pushed_nbytes,
            seconds,
            partial(pipeline.encode, loaded, self._prepared),
            assigned_version=version,
        )
