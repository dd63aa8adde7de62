"""The asyncio edge of framing: one frame at a time over a non-blocking socket, without asyncio's streams.

asyncio's streams and ``loop.sock_*`` lose received descriptors, so this waits with ``add_reader`` / ``add_writer`` and
reads with ``recvmsg``. After every frame it yields to the loop once: a client that always has the next frame ready
would otherwise never let another one run. Readers and writers are removed before a descriptor can be closed and its
number used again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from weightcached.protocol.framing import Budget, Frame, FrameReceiver, FrameSender, encode_frame
from weightcached.protocol.messages import Dialect, Message

_CLOSED_HERE = "the connection was closed here"


class AsyncChannel:
    """Owns ``connection``. One task may receive while another sends; no two may do the same thing at once.

    Deadlines are the caller's: cancel a call (``asyncio.timeout``) and close the channel.
    """

    def __init__(
        self, connection: socket.socket, *, outgoing: Dialect, incoming: Dialect, budget: Budget | None = None
    ) -> None:
        """``budget`` is asked for room for every body, incoming and outgoing, for as long as it is under way."""
        connection.setblocking(False)
        self.connection = connection
        self._outgoing = outgoing
        self._budget = budget
        self._receiver = FrameReceiver(incoming, budget=budget)
        self._waits: list[Callable[[], None]] = []

    async def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one frame; ``fds`` stay the caller's. Raises PeerClosed, ConnectionError when closed here, and what the
        budget raises.
        """
        data = encode_frame(self._outgoing, message, fd_count=len(fds))
        sender = FrameSender(data, tuple(fds))
        taken = False
        try:
            while True:
                self._require_open()
                try:
                    if sender.step(self.connection):
                        return
                except BlockingIOError:
                    if self._budget is not None and not taken:  # until the peer has read, it stays in our memory
                        self._budget.take(len(data))
                        taken = True
                    await self._ready(writing=True)
        finally:
            if self._budget is not None and taken:
                self._budget.give(len(data))

    async def readable(self) -> None:
        """Wait until something can be received, end of file included, and receive nothing."""
        await self._ready(writing=False)

    async def receive(self) -> Frame:
        """Receive one frame. Raises PeerClosed, ProtocolError, TransferError, or ConnectionError when closed here."""
        while True:
            self._require_open()
            try:
                frame = self._receiver.step(self.connection)
            except BlockingIOError:
                await self._ready(writing=False)
                continue
            if frame is not None:
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    frame.fds.close()
                    raise
                return frame

    async def _ready(self, *, writing: bool) -> None:
        self._require_open()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        fd = self.connection.fileno()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        def fail() -> None:
            if not ready.done():
                ready.set_exception(ConnectionError(_CLOSED_HERE))

        (loop.add_writer if writing else loop.add_reader)(fd, wake)
        self._waits.append(fail)
        try:
            await ready
        finally:
            self._waits.remove(fail)
            if self.connection.fileno() >= 0:
                (loop.remove_writer if writing else loop.remove_reader)(fd)

    def _require_open(self) -> None:
        """It may be closed at any wait, and also after it became ready and before the task that waited runs again."""
        if self.connection.fileno() < 0:
            raise ConnectionError(_CLOSED_HERE)

    def close(self) -> None:
        """Close the connection; whoever waits on it gets a ConnectionError. Safe to call twice."""
        fd = self.connection.fileno()
        if fd < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(fd)
        loop.remove_writer(fd)
        self._receiver.close()
        self.connection.close()
        for fail in list(self._waits):
            fail()
