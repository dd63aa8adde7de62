"""The worker process as the keeper sees it: started, spoken with, waited for, and gone at the end on every path.

Owns the channel to it, and what its silence, its death and its last words mean. What is asked of it, in which order,
is ``loading.py``'s and ``pushed.py``'s business.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from weightcached.daemon.children import Child, describe_exit
from weightcached.daemon.holder import Holder
from weightcached.daemon.progress import ProgressTracker
from weightcached.protocol.aio import AsyncChannel
from weightcached.protocol.errors import TransferError, WeightCacheError, WorkerDied, error_from
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import Frame, PeerClosed
from weightcached.protocol.memory.kinds import MemoryKind
from weightcached.protocol.worker_messages import (
    KEEPER_TO_WORKER,
    WORKER_TO_KEEPER,
    Done,
    Failed,
    Job,
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
        open. Cancelled once a frame is there, its descriptors are closed: whoever is cancelled gets no result.
        """
        receiving = asyncio.create_task(self._channel.receive(), name="worker's next frame")
        frame = None
        try:
            await asyncio.wait({receiving, self._exit}, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(_LAST_FRAME_TIMEOUT_S if self._exit.done() else None):
                frame = await receiving
            return frame
        except (PeerClosed, ConnectionError, TimeoutError) as error:
            raise await self._death() from error
        finally:
            receiving.cancel()
            if frame is None and receiving.done() and not receiving.cancelled() and receiving.exception() is None:
                receiving.result().fds.close()

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
    told to stay. Raises TransientFailure where it cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = AsyncChannel(ours, outgoing=KEEPER_TO_WORKER, incoming=WORKER_TO_KEEPER)
    try:
        with theirs:
            fd = theirs.fileno()
            arguments = ["--fd", str(fd), *(["--yield"] if yields else [])]
            try:
                child = await Child.start("worker", WORKER_MODULE, arguments, pass_fds=[fd])
            except WorkerDied as error:
                raise TransientFailure(error) from error
        worker = Worker(child, channel)
        try:
            yield worker
        finally:
            if not worker.stays:
                await child.end()
    finally:
        channel.close()
