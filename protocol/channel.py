"""The blocking edge of framing: one frame at a time over a connected socket, each under the exchange's deadline.

For clients and for the worker, which have no event loop. The keeper uses ``aio.py``. Not thread-safe: a channel belongs
to one thread at a time.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

from weightcached.protocol.deadline import Deadline
from weightcached.protocol.framing import Frame, FrameReceiver, FrameSender, encode_frame
from weightcached.protocol.messages import Dialect, Message


class Channel:
    """Owns ``connection`` and speaks ``outgoing`` and understands ``incoming`` on it."""

    def __init__(self, connection: socket.socket, *, outgoing: Dialect, incoming: Dialect) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._outgoing = outgoing
        self._receiver = FrameReceiver(incoming)

    def send(self, message: Message, fds: Sequence[int] = (), *, deadline: Deadline | None = None) -> None:
        """Send one frame; ``fds`` stay the caller's. Blocks until it is out. Raises TimeoutError or PeerClosed."""
        sender = FrameSender(encode_frame(self._outgoing, message, fd_count=len(fds)), tuple(fds))
        while True:
            try:
                if sender.step(self.connection):
                    return
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            if deadline is not None and deadline.passed:
                raise TimeoutError("the exchange's deadline passed in the middle of a frame")

    def receive(self, *, deadline: Deadline | None = None) -> Frame:
        """Receive one frame. Blocks. Raises TimeoutError, PeerClosed, ProtocolError or TransferError.

        A TimeoutError keeps what has arrived of a frame: calling again goes on where it stopped.
        """
        while True:
            try:
                frame = self._receiver.step(self.connection)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            if frame is not None:
                return frame
            if deadline is not None and deadline.passed:
                raise TimeoutError("the exchange's deadline passed in the middle of a frame")

    def _wait(self, events: int, deadline: Deadline | None) -> None:
        poll = select.poll()
        poll.register(self.connection, events)
        timeout_ms = None if deadline is None else deadline.remaining_s() * 1000
        if not poll.poll(timeout_ms):
            raise TimeoutError("the exchange's deadline passed")

    def close(self) -> None:
        """Close the connection and any half-received descriptors. Safe to call twice."""
        self._receiver.close()
        self.connection.close()
