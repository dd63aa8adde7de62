"""One attempt to load: supervises the worker process and turns what it reports into a generation, or into an error.

Owns the order of the exchange (``worker_messages.py``), admission, allocation and sealing of segments, and the end of
the worker on every path. Publishing is the keeper's: nothing is visible to anybody before :func:`load` has returned,
and a segment is sealed only after the worker said that all of it is filled. Knows nothing of how shards are made.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weightcached.daemon.children import Child, describe_exit
from weightcached.daemon.generation import CheckpointReceipts, Generation, Origin, sha256_of
from weightcached.daemon.holder import Holder
from weightcached.daemon.patience import in_thread
from weightcached.daemon.progress import ProgressTracker
from weightcached.protocol.aio import AsyncChannel
from weightcached.protocol.config import CacheConfig, Provenance
from weightcached.protocol.content import version_of
from weightcached.protocol.errors import (
    DeploymentError,
    InsufficientMemory,
    ProtocolError,
    SnapshotMismatch,
    TransferError,
    WeightCacheError,
    WorkerDied,
    error_from,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import Frame, PeerClosed
from weightcached.protocol.manifest import MANIFEST_MAX_BYTES
from weightcached.protocol.memory import host, names
from weightcached.protocol.memory.admission import Room
from weightcached.protocol.memory.kinds import MemoryKind, kind_of
from weightcached.protocol.worker_messages import (
    KEEPER_TO_WORKER,
    WORKER_TO_KEEPER,
    Done,
    Failed,
    Job,
    LoadStrategy,
    Memory,
    Planned,
    Progress,
)

WORKER_MODULE = "weightcached.loader.worker"
_EXIT_TIMEOUT_S = 10.0
_LAST_FRAME_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


class TransientFailure(Exception):
    """The attempt failed in a way that another may not. ``cause`` is the error to report if it was the last."""

    def __init__(self, cause: WeightCacheError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What to load, and what the keeper knows about it."""

    origin: Origin
    config: CacheConfig
    provenance: Provenance
    trusted_filesystems: tuple[str, ...]
    known_digest: Callable[[CheckpointReceipts], str | None]
    """The content digest that was remembered for these receipts."""
    snapshot: Path | None = None
    """Load this rank's part of the snapshot in this directory, instead of the weights of the checkpoint."""
    strategy: LoadStrategy = "auto"
    engine_arguments: tuple[str, ...] = ()
    """Of the engine that makes the config's layout, where there is one."""
    engine_inputs: str | None = None
    """What its key was computed from, as one hash."""
    yields: bool = False
    """Processors and disk go to everybody else first: engines compute with what is served meanwhile."""
    make_room: Callable[[], Awaitable[bool]] | None = None
    """Gives back some memory that is not needed; whether there was any. Asked as long as the shard does not fit."""


async def load(request: LoadRequest, progress: ProgressTracker) -> Generation:
    """Run one worker to the end. The caller owns the generation.

    Raises TransientFailure (the worker died, or said that trying again may help, or no descriptor is left, but clients
    may give some back) or the error of a permanent cause. Cancelled or failed, the worker is gone and its memory closed
    when this returns.
    """
    try:
        return await _loaded(request, progress)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise TransientFailure(
            DeploymentError(
                "the daemon has no descriptor left to load with",
                found=error.strerror,
                next_step="raise the daemon's limit on open files (LimitNOFILE=, ulimit -n), or end engines",
            )
        ) from error


async def _loaded(request: LoadRequest, progress: ProgressTracker) -> Generation:
    generation_id, kind = secrets.token_hex(16), kind_of(request.config)
    progress.update("start worker")
    async with started_worker(yields=request.yields) as worker:
        await worker.send(
            Job(
                model_dir=request.origin.model_dir,
                config=request.config.model_dump(),
                generation=generation_id,
                keeper_pid=os.getpid(),
                trusted_filesystems=request.trusted_filesystems,
                snapshot=None if request.snapshot is None else os.fspath(request.snapshot),
                strategy=request.strategy,
                engine_arguments=request.engine_arguments,
            )
        )
        planned, none = await worker.receive(progress)
        none.close()
        if not isinstance(planned, Planned):
            raise out_of_turn(planned, expected="Planned")
        room = await admitted(kind, planned.segments_nbytes, request.make_room)
        log.info(
            "planned",
            extra={
                "segments_nbytes": list(planned.segments_nbytes),
                "bytes_to_read": planned.bytes_to_read,
                "free_nbytes": room.free_nbytes,
                "tightest_limit": room.source,
                "receipts_trusted": planned.receipts_trusted,
                "receipts_rule": planned.receipts_rule,
            },
        )
        receipts, digest = _content(planned, request)
        with OwnedFds() as memory:
            for number, nbytes in enumerate(planned.segments_nbytes):
                name = names.segment_name(generation_id, number)
                await in_thread(partial(allocate, memory, kind, nbytes, name))
            rankless = request.config.rankless_fingerprint
            # Where no file was seen, ranks have the digest to compare from the start.
            stands_in = None if receipts.known else digest
            receipts_version = version_of(rankless, digest=stands_in, receipts=receipts.sha256)
            await worker.send(
                Memory(
                    version=version_of(rankless, digest=digest, receipts=receipts.sha256),
                    receipts_version=receipts_version,
                    digest=digest,
                ),
                list(memory),
            )
            done, manifest = await worker.receive(progress)
            with manifest:
                if not isinstance(done, Done):
                    raise out_of_turn(done, expected="Done")
                check_manifest(done, manifest)
                progress.update("seal")
                await worker.seal(memory, kind)
                sha256 = await sha256_of(manifest[0], nbytes=done.manifest_nbytes)
                holder = worker.stay(memory) if kind.dies_with_holder else None
                # The worker has said all it had to say: the block's end ends one that does not stay, and nobody waits
                # for its exit.
                return Generation(
                    id=generation_id,
                    config=request.config,
                    memory=OwnedFds([manifest.take(0), *memory.take_all()]),
                    holder=holder,
                    manifest_nbytes=done.manifest_nbytes,
                    manifest_sha256=sha256,
                    segments_nbytes=planned.segments_nbytes,
                    resident_nbytes=sum(map(kind.resident_nbytes, planned.segments_nbytes)),
                    bytes_read=done.bytes_read,
                    bytes_kept=done.bytes_kept,
                    accounting=planned.accounting,
                    receipts=receipts,
                    receipts_version=receipts_version,
                    digest=digest,
                    provenance=request.provenance,
                    origin=request.origin,
                    seconds=done.seconds,
                    engine_inputs=request.engine_inputs,
                )


async def admitted(
    kind: MemoryKind,
    segments_nbytes: Sequence[int],
    make_room: Callable[[], Awaitable[bool]] | None,
) -> Room:
    """Measured, again after each time that something was given back. Raises InsufficientMemory."""
    nbytes = sum(map(kind.resident_nbytes, segments_nbytes))
    while True:
        try:
            return await in_thread(partial(kind.admit, nbytes))
        except InsufficientMemory:
            if make_room is None or not await make_room():
                raise


def allocate(memory: OwnedFds, kind: MemoryKind, nbytes: int, name: str) -> None:
    """Into ``memory`` at once: whoever asked may have been told to stop, and would drop what is only returned."""
    memory.append(kind.allocate(nbytes, name=name))


def out_of_turn(message: Planned | Done, *, expected: str) -> ProtocolError:
    """A worker that has said ``message`` instead."""
    return ProtocolError("the worker spoke out of turn", expected=expected, found=type(message).__name__)


def _content(planned: Planned, request: LoadRequest) -> tuple[CheckpointReceipts, str | None]:
    """Receipts of the files that the weights come from, and their digest where it is known already.

    A snapshot says which content it was made from, and nothing is read to check that. Where the checkpoint is there to
    be seen and was digested before, it has to be the same: SnapshotMismatch. Then its receipts prove what is loaded.
    """
    receipts = _receipts(planned)
    remembered = request.known_digest(receipts)
    if planned.digest is None:
        return receipts, remembered
    if remembered is None:
        return CheckpointReceipts.unknown(
            "the weights come from a snapshot, which only a digest can prove"
        ), planned.digest
    if remembered != planned.digest:
        raise SnapshotMismatch(
            "the snapshot was made from another checkpoint than the one that is there now",
            expected=f"content digest {remembered}",
            found=f"content digest {planned.digest}",
            where=request.origin.model_dir,
            next_step="make the snapshot again with `weightcached snapshot save`, or load without --snapshot",
        )
    return receipts, planned.digest


def _receipts(planned: Planned) -> CheckpointReceipts:
    """Receipts of files written a moment ago prove nothing: the next edit might leave the same times."""
    if planned.receipts is None:
        return CheckpointReceipts.unknown("no weight files were there to be seen")
    if planned.receipts_trusted and planned.receipts_young:
        rule = "the files were written less than two seconds before they were read"
        return CheckpointReceipts(planned.receipts, trusted=False, rule=rule)
    return CheckpointReceipts(planned.receipts, trusted=planned.receipts_trusted, rule=planned.receipts_rule)


def check_manifest(done: Done, manifest: OwnedFds) -> None:
    """Raises TransferError unless the one descriptor that came with ``done`` is a manifest's."""
    if len(manifest) != 1:
        raise TransferError("the worker's report lacks the manifest", expected="1 descriptor", found=len(manifest))
    if done.manifest_nbytes > MANIFEST_MAX_BYTES:
        raise TransferError("the manifest is too large", expected=MANIFEST_MAX_BYTES, found=done.manifest_nbytes)
    host.verify(manifest[0], nbytes=done.manifest_nbytes, what="the manifest")


class Worker:
    """A running worker and the channel to it."""

    def __init__(self, child: Child, channel: AsyncChannel) -> None:
        self.child = child
        self.stays = False
        self._channel = channel
        self._exit = asyncio.create_task(child.process.wait(), name="worker's exit")

    async def send(self, message: Job | Memory, fds: Sequence[int] = ()) -> None:
        """``fds`` stay the caller's. Raises as :meth:`receive` where it has ended."""
        try:
            await self._channel.send(message, fds)
        except ConnectionError as error:
            raise await self._death() from error

    async def receive(self, progress: ProgressTracker) -> tuple[Planned | Done, OwnedFds]:
        """The next message that is neither progress nor failure, and its descriptors, which the caller owns."""
        while True:
            frame = await self._frame()
            message = frame.message
            if isinstance(message, Planned | Done):
                return message, frame.fds
            frame.fds.close()
            if isinstance(message, Progress):
                progress.update(message.stage, bytes_done=message.bytes_done, bytes_total=message.bytes_total)
            elif isinstance(message, Failed):
                cause = error_from(message.model_dump())
                raise TransientFailure(cause) if message.transient else cause

    async def _frame(self) -> Frame:
        """The next frame, or the worker's death, whichever comes first: a process it started may hold the channel
        open.
        """
        receiving = asyncio.create_task(self._channel.receive(), name="worker's next frame")
        try:
            await asyncio.wait({receiving, self._exit}, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(_LAST_FRAME_TIMEOUT_S if self._exit.done() else None):
                return await receiving
        except (PeerClosed, ConnectionError, TimeoutError) as error:
            raise await self._death() from error
        finally:
            receiving.cancel()

    async def _death(self) -> TransientFailure | WorkerDied:
        """What its end without a result is. One that ends as if all were well does so again: that is for good."""
        code = await self.child.end()
        found = describe_exit(code)
        if code == -signal.SIGKILL:
            found += " (the kernel's out-of-memory killer does that; see the kernel's log)"
        cause = WorkerDied(
            "the worker process ended before it was done",
            found=f"{found}; last words: {self.child.last_words}",
            next_step="see the daemon's log for what it wrote",
        )
        return TransientFailure(cause) if code else cause

    async def seal(self, memory: OwnedFds, kind: MemoryKind) -> None:
        """Seal every segment. Where a writable mapping is still alive, wait for the worker's exit first."""
        try:
            _seal(memory, kind)
        except BlockingIOError:
            log.warning("a segment is still mapped after Done: sealing when the worker has ended")
            await self.finish()
            try:
                _seal(memory, kind)
            except BlockingIOError as error:
                raise TransferError(
                    "a segment cannot be sealed: somebody can still write to it",
                    expected="no writable mapping once the worker has ended",
                    found=error.strerror,
                    next_step="a process that the worker started is still alive: find and end it",
                ) from error

    def stay(self, memory: OwnedFds) -> Holder:
        """Let it live on, as the holder of what it has filled, for as long as ``memory``, to which its descriptors are
        added, is not closed. Raises as :meth:`Holder.watched`.
        """
        holder = Holder(self.child)
        memory.append(holder.watched())
        memory.append(fcntl.fcntl(self._channel.connection, fcntl.F_DUPFD_CLOEXEC, 0))
        self.stays = True
        return holder

    async def finish(self) -> None:
        """Wait for the exit of a worker that has reported; one that lingers is killed."""
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                code = await self.child.ended()
        except TimeoutError:
            code = await self.child.end()
        if code != 0:
            log.warning("the worker had done its work, but ended badly", extra={"exit": describe_exit(code)})


def _seal(memory: OwnedFds, kind: MemoryKind) -> None:
    for fd in memory:
        kind.seal(fd)


@asynccontextmanager
async def started_worker(*, yields: bool = False) -> AsyncIterator[Worker]:
    """A worker with the other end of our channel; whatever happens in the block, it is gone after it, unless it was
    told to stay.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = AsyncChannel(ours, outgoing=KEEPER_TO_WORKER, incoming=WORKER_TO_KEEPER)
    try:
        with theirs:
            fd = theirs.fileno()
            arguments = ["--fd", str(fd), *(["--yield"] if yields else [])]
            child = await Child.start("worker", WORKER_MODULE, arguments, pass_fds=[fd])
        worker = Worker(child, channel)
        try:
            yield worker
        finally:
            if not worker.stays:
                await child.end()
    finally:
        channel.close()
