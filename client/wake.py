"""Waiting for a connection in a way that another thread can interrupt.

Owns :class:`Wake`. A lease's watcher waits with it, whether it has a connection or pauses between two attempts to get
one, so that closing a lease never takes longer than a moment.
"""

from __future__ import annotations

import os
import select
import socket
import threading

from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.framing import Frame


class Ended(Exception):
    """Nobody wants what is being waited for any more: let go of everything, and leave."""


class Wake:
    """One thread waits; any thread may :meth:`nudge` it, or :meth:`end` its waiting for good."""

    _fd = -1

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def nudge(self) -> None:
        """The wait under way, or else the next, returns at once. No effect after :meth:`close`."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def end(self) -> None:
        """The wait under way and all later ones raise :class:`Ended`."""
        self._ended = True
        self.nudge()

    def wait(self, timeout_s: float, *, on: socket.socket | int | None = None) -> bool:
        """Block until ``on`` (a descriptor or socket) has something to read, or has ended, a nudge, or the timeout;
        whether it is the first.

        Raises Ended.
        """
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if on is not None:
            poll.register(on, select.POLLIN)
        readable = False
        for fd, _ in poll.poll(timeout_s * 1000):
            if fd == self._fd:
                os.eventfd_read(fd)
            else:
                readable = True
        if self._ended:
            raise Ended
        return readable

    def hear(self, channel: Channel, *, timeout_s: float) -> Frame:
        """The next frame. Blocks. Raises Ended, TimeoutError, and what :meth:`Channel.receive` raises."""
        deadline = Deadline.after(timeout_s)
        while True:
            try:
                return channel.receive(deadline=Deadline.after(0))
            except TimeoutError:
                if deadline.passed:
                    raise
            self.wait(deadline.remaining_s(), on=channel.connection)

    def close(self) -> None:
        """Give the descriptor back; for the thread that waits, when it waits no more. Safe to call twice."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """For one that never got as far as a thread that waits."""
        if self._fd >= 0:
            self.close()

    def let_go_in_child(self) -> None:
        """Close this copy in a forked child, where the lock may be held by a thread that is not there."""
        self._lock = threading.Lock()
        self.close()
