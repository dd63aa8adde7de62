"""Segments that a worker fills, whoever has the bytes: what a load and a push have in common.

Owns the exchange with the worker, in its order: job → plan → memory → manifest → sealing; and what an answer out of
turn, or a manifest that is none, means. What the bytes are is ``loading.py``'s and ``pushed.py``'s business. A segment
is sealed only after the worker said that all of it is filled.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from weightcached.daemon.generation import CheckpointReceipts, Generation, Origin, sha256_of
from weightcached.daemon.patience import in_thread
from weightcached.daemon.progress import ProgressTracker
from weightcached.daemon.worker_process import Worker, started_worker
from weightcached.protocol.config import CacheConfig, Provenance
from weightcached.protocol.errors import InsufficientMemory, ProtocolError, TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import MANIFEST_MAX_BYTES
from weightcached.protocol.memory import host, names
from weightcached.protocol.memory.admission import Room
from weightcached.protocol.memory.kinds import MemoryKind, kind_of
from weightcached.protocol.worker_messages import Done, Job, LoadStrategy, Memory, Planned, Push

_Said = TypeVar("_Said", Planned, Done)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a generation is, besides what its worker says of it. As the fields of :class:`Generation`."""

    config: CacheConfig
    receipts: CheckpointReceipts
    receipts_version: str
    digest: str | None
    provenance: Provenance
    origin: Origin
    engine_inputs: str | None
    pushed_by: str | None = None


class Filling:
    """One generation that is being made, by one worker. Made by :func:`started_filling`, which closes what is left of
    ``memory``.

    Each step raises TransientFailure (the worker died, or said that trying again may help) or the error of a permanent
    cause, ProtocolError and TransferError for a worker that breaks the exchange.
    """

    def __init__(self, config: CacheConfig, worker: Worker, memory: OwnedFds, progress: ProgressTracker) -> None:
        self.generation_id = secrets.token_hex(16)
        self.kind = kind_of(config)
        self._config = config
        self._worker = worker
        self._memory = memory
        self._progress = progress

    async def plan(
        self,
        model_dir: str,
        *,
        trusted_filesystems: tuple[str, ...],
        snapshot: str | None = None,
        strategy: LoadStrategy = "auto",
        engine_arguments: tuple[str, ...] = (),
        push: Push | None = None,
        fds: Sequence[int] = (),
    ) -> Planned:
        """Say what is to be done (as :class:`Job` has it); what that takes. ``fds`` stay the caller's."""
        job = Job(
            model_dir=model_dir,
            config=self._config.model_dump(),
            generation=self.generation_id,
            keeper_pid=os.getpid(),
            trusted_filesystems=trusted_filesystems,
            snapshot=snapshot,
            strategy=strategy,
            engine_arguments=engine_arguments,
            push=push,
        )
        await self._worker.send(job, fds)
        planned, none = await self._receive(Planned)
        none.close()
        return planned

    async def allocate(self, planned: Planned) -> None:
        """Memory for what is planned. Whether there is room was seen before (:func:`admitted`)."""
        for number, nbytes in enumerate(planned.segments_nbytes):
            name = names.segment_name(self.generation_id, number)
            await in_thread(partial(_allocate, self._memory, self.kind, nbytes, name))

    async def hand_over(self, message: Memory, fds: Sequence[int] = ()) -> None:
        """Give the worker the memory, and then ``fds``, which stay the caller's: it begins to fill."""
        await self._worker.send(message, [*self._memory, *fds])

    async def sealed(self, planned: Planned, identify: Callable[[Done], Identity]) -> Generation:
        """Wait until all is filled, and seal it. ``identify`` is asked before that what has become of it. The caller
        owns the generation.
        """
        done, manifest = await self._receive(Done)
        with manifest:
            identity = identify(done)
            _check_manifest(done, manifest)
            self._progress.update("seal")
            await self._worker.seal(self._memory, self.kind)
            sha256 = await sha256_of(manifest[0], nbytes=done.manifest_nbytes)
            # The worker has said all it had to say: one that does not stay is ended, and nobody waits for its exit.
            holder = self._worker.stay(self._memory) if self.kind.dies_with_holder else None
            return Generation(
                id=self.generation_id,
                config=identity.config,
                memory=OwnedFds([manifest.take(0), *self._memory.take_all()]),
                holder=holder,
                manifest_nbytes=done.manifest_nbytes,
                manifest_sha256=sha256,
                segments_nbytes=planned.segments_nbytes,
                resident_nbytes=sum(map(self.kind.resident_nbytes, planned.segments_nbytes)),
                bytes_read=done.bytes_read,
                bytes_kept=done.bytes_kept,
                accounting=planned.accounting,
                receipts=identity.receipts,
                receipts_version=identity.receipts_version,
                digest=identity.digest,
                provenance=identity.provenance,
                origin=identity.origin,
                seconds=done.seconds,
                engine_inputs=identity.engine_inputs,
                pushed_by=identity.pushed_by,
            )

    async def _receive(self, expected: type[_Said]) -> tuple[_Said, OwnedFds]:
        """What the worker says next, and its descriptors, which the caller owns."""
        message, fds = await self._worker.receive(self._progress)
        if not isinstance(message, expected):
            fds.close()
            raise ProtocolError(
                "the worker spoke out of turn", expected=expected.__name__, found=type(message).__name__
            )
        return message, fds


@asynccontextmanager
async def started_filling(
    config: CacheConfig, progress: ProgressTracker, *, yields: bool = False
) -> AsyncIterator[Filling]:
    """A worker that waits for its job, with memory to come. After the block the worker is gone, unless it was told to
    stay, and the memory closed, unless it has become a generation's.
    """
    progress.update("start worker")
    with OwnedFds() as memory:
        async with started_worker(yields=yields) as worker:
            yield Filling(config, worker, memory, progress)


async def admitted(
    kind: MemoryKind, segments_nbytes: Sequence[int], make_room: Callable[[], Awaitable[bool]] | None
) -> Room:
    """Measured, again after each time that something was given back. Raises InsufficientMemory."""
    nbytes = sum(map(kind.resident_nbytes, segments_nbytes))
    while True:
        try:
            return await in_thread(partial(kind.admit, nbytes))
        except InsufficientMemory:
            if make_room is None or not await make_room():
                raise


def _allocate(memory: OwnedFds, kind: MemoryKind, nbytes: int, name: str) -> None:
    """Into ``memory`` at once: whoever asked may have been told to stop, and would drop what is only returned."""
    memory.append(kind.allocate(nbytes, name=name))


def _check_manifest(done: Done, manifest: OwnedFds) -> None:
    """Raises TransferError unless the one descriptor that came with ``done`` is a manifest's."""
    if len(manifest) != 1:
        raise TransferError("the worker's report lacks the manifest", expected="1 descriptor", found=len(manifest))
    if done.manifest_nbytes > MANIFEST_MAX_BYTES:
        raise TransferError("the manifest is too large", expected=MANIFEST_MAX_BYTES, found=done.manifest_nbytes)
    host.verify(manifest[0], nbytes=done.manifest_nbytes, what="the manifest")
