"""The steps that scripts are made of, for either side of a connection.

Owns :class:`Wire` (one connection, with what was received on it), :class:`Gate` (an event between a script and its
test) and the steps. A step blocks until it is done; the wire's deadline bounds a whole script. For tests.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.framing import Frame, FrameSender, PeerClosed
from weightcached.protocol.messages import Grant, Message, Ping, Pong, Refused, Switch
from weightcached.protocol.testing.frames import frame


class Gate:
    """Closed until somebody opens it, then open for ever. Scripts and tests wait on it without polling."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._finalizer = weakref.finalize(self, os.close, self._fd)

    def open(self) -> None:
        os.eventfd_write(self._fd, 1)

    def wait(self, *, timeout_s: float = 10.0) -> None:
        """Blocks until the gate is open; TimeoutError when it stays shut."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            raise TimeoutError(f"nobody opened the gate within {timeout_s} s")

    def close(self) -> None:
        """Give its descriptor back now, where somebody counts them: else that happens with the last reference."""
        self._finalizer()

    @property
    def is_open(self) -> bool:
        return bool(select.select([self._fd], [], [], 0)[0])

    def fileno(self) -> int:
        return self._fd


@dataclass
class Wire:
    """One connection under a script. Owns the descriptors in ``frames``; whoever runs the script closes it."""

    channel: Channel
    deadline: Deadline
    die: Callable[[], None]
    frames: list[Frame] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def connection(self) -> socket.socket:
        return self.channel.connection

    @property
    def messages(self) -> list[Message]:
        """Everything received so far, in order."""
        return [received.message for received in self.frames]

    def write(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send bytes as they are; ``fds`` ride on the first."""
        sender = FrameSender(data, tuple(fds))
        while True:
            try:
                if sender.step(self.connection):
                    return
            except BlockingIOError:
                self.wait(select.POLLOUT)

    def wait(self, events: int, *, also: Gate | None = None, timeout_s: float | None = None) -> bool:
        """Wait for ``events`` or the end of the connection, or for ``also``. False when ``timeout_s`` passed first.

        TimeoutError when the script's deadline passes.
        """
        poll = select.poll()
        poll.register(self.connection, events)
        if also is not None:
            poll.register(also, select.POLLIN)
        left_s = self.deadline.remaining_s()
        if poll.poll((left_s if timeout_s is None else min(left_s, timeout_s)) * 1000):
            return True
        if self.deadline.passed:
            raise TimeoutError("the script's deadline passed")
        return False

    def cut(self) -> None:
        """From another thread: end both directions, so that whoever works on the wire sees its end at once."""
        with self._lock:
            if self.connection.fileno() >= 0:
                self.connection.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Close the connection; received frames keep their descriptors."""
        with self._lock:
            self.channel.close()

    def close(self) -> None:
        """Close the connection and every descriptor received on it that nobody took."""
        self.hang_up()
        for received in self.frames:
            received.fds.close()


class Step(Protocol):
    """Anything with ``run``; the dataclasses below, or one's own."""

    def run(self, wire: Wire) -> None:
        """Do it. PeerClosed when the other side went away."""


@dataclass(frozen=True)
class Receive:
    """Read one frame, honestly, into ``wire.frames``."""

    def run(self, wire: Wire) -> None:
        wire.frames.append(wire.channel.receive(deadline=wire.deadline))


@dataclass(frozen=True)
class ReceiveToEnd:
    """Read frames into ``wire.frames`` until the peer closes the connection. PeerClosed if that cuts a frame short."""

    def run(self, wire: Wire) -> None:
        while True:
            try:
                Receive().run(wire)
            except PeerClosed as error:
                if error.mid_frame:
                    raise
                return


def _heard(wire: Wire) -> Message | None:
    """The next message; a ``Ping`` is answered. None where the peer has closed the connection."""
    try:
        Receive().run(wire)
    except PeerClosed as error:
        if error.mid_frame:
            raise
        return None
    said = wire.messages[-1]
    if isinstance(said, Ping):
        Send(Pong(token=said.token)).run(wire)
    return said


@dataclass(frozen=True)
class AnswerPings:
    """Answer every ``Ping``, and read whatever else is said, until the gate opens or the peer closes the connection."""

    until: Gate | None = None

    def run(self, wire: Wire) -> None:
        while wire.wait(select.POLLIN, also=self.until) and not (self.until is not None and self.until.is_open):
            if _heard(wire) is None:
                return


@dataclass(frozen=True)
class AnswerSwitches:
    """Answer every ``Switch`` with the grant of that generation or version, or with neither of ``current``, and every
    ``Ping``, until the peer closes the connection. What is not among ``grants`` is gone.
    """

    grants: Sequence[Granted]
    current: Granted | None = None

    def run(self, wire: Wire) -> None:
        while wire.wait(select.POLLIN):
            said = _heard(wire)
            if said is None:
                return
            if isinstance(said, Switch):
                self._answer(said).run(wire)

    def _answer(self, said: Switch) -> Send:
        if said.generation is None and said.version is None and self.current is not None:
            return self.current.step()
        for grant in self.grants:
            if grant.message.generation == said.generation or grant.message.version == said.version:
                return grant.step()
        return Send(Refused(code="generation_gone", message="not held here", found=f"{said}"))


class Granted(Protocol):
    """As ``HonestGrant``."""

    @property
    def message(self) -> Grant: ...

    def step(self) -> Send: ...


@dataclass(frozen=True)
class Send:
    """Send one valid message, or what a function makes of the last one received. Bounded by no limit but the peer's."""

    message: Message | Callable[[Message], Message]
    fds: Sequence[int] = ()

    def run(self, wire: Wire) -> None:
        message = self.message if isinstance(self.message, Message) else self.message(wire.messages[-1])
        wire.write(frame(message, fd_count=len(self.fds)), self.fds)


@dataclass(frozen=True)
class SendRaw:
    """Send any bytes (see ``frame``) in one piece, with any descriptors on the first: half a frame, or two at once."""

    data: bytes
    fds: Sequence[int] = ()

    def run(self, wire: Wire) -> None:
        wire.write(self.data, self.fds)


@dataclass(frozen=True)
class Drip:
    """Send bytes a few at a time, with a pause after each."""

    data: bytes
    nbytes_each: int = 1
    every_s: float = 0.01

    def run(self, wire: Wire) -> None:
        for start in range(0, len(self.data), self.nbytes_each):
            wire.write(self.data[start : start + self.nbytes_each])
            wire.wait(0, timeout_s=self.every_s)


@dataclass(frozen=True)
class Flood:
    """Send the same bytes again and again, reading nothing, until the socket takes no more for ``patience_s``."""

    data: bytes
    patience_s: float = 0.2

    def run(self, wire: Wire) -> None:
        sender = FrameSender(self.data)
        while True:
            try:
                if sender.step(wire.connection):
                    sender = FrameSender(self.data)
            except BlockingIOError:
                if not wire.wait(select.POLLOUT, timeout_s=self.patience_s):
                    return


@dataclass(frozen=True)
class Repeat:
    """Run a step again and again, with a pause after each, until the peer closes the connection."""

    step: Step
    every_s: float = 0.01

    def run(self, wire: Wire) -> None:
        while not wire.wait(select.POLLRDHUP, timeout_s=self.every_s):
            self.step.run(wire)


@dataclass(frozen=True)
class Stall:
    """Say nothing until the gate opens or the peer closes the connection; without a gate, until the peer does."""

    until: Gate | None = None

    def run(self, wire: Wire) -> None:
        wire.wait(select.POLLRDHUP, also=self.until)


@dataclass(frozen=True)
class Open:
    """Open a gate: the test learns that the script came this far."""

    gate: Gate

    def run(self, wire: Wire) -> None:
        self.gate.open()


@dataclass(frozen=True)
class HalfClose:
    """Say that nothing more will be sent, and go on reading."""

    def run(self, wire: Wire) -> None:
        wire.connection.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class Close:
    """Close the connection, as the end of a daemon's script does."""

    def run(self, wire: Wire) -> None:
        wire.hang_up()


@dataclass(frozen=True)
class Reset:
    """Wait until the peer has sent something, and close without reading it: the peer gets ECONNRESET."""

    def run(self, wire: Wire) -> None:
        wire.wait(select.POLLIN)
        wire.hang_up()


@dataclass(frozen=True)
class Die:
    """End the whole daemon as a kill does: every connection closed, the socket file left, nobody behind it."""

    def run(self, wire: Wire) -> None:
        wire.die()
