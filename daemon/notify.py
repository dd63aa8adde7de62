"""What the keeper tells its service manager, and gives it to keep: the sending side of the notify protocol.

Owns the connection to ``NOTIFY_SOCKET``, waiting for room in its short queue (about a dozen datagrams), signs of life
for the watchdog, and the two ways to learn how far the manager is: the barrier and the question what it keeps. What is
stored, when, and what a refusal means is the vault's business. Used on the event loop, by any number of tasks: each
datagram goes out whole, in the order in which they were begun.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NoReturn

from weightcached.daemon.notify_protocol import (
    KEPT_QUERY,
    SUPERVISOR_VARIABLE,
    encode,
    name_is_usable,
    socket_address,
    watchdog_interval_s,
)
from weightcached.daemon.text import one_line
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import ManagerUnreachable
from weightcached.protocol.fds import OwnedFds

TIMEOUT_S = 10.0
"""For one datagram to find room, and for one answer, where the caller says nothing else."""
_SAID = ("NOTIFY_SOCKET", SUPERVISOR_VARIABLE, "WATCHDOG_USEC", "WATCHDOG_PID")
_CHUNK_NBYTES = 64 * 1024
_STATUS_MAX_CHARACTERS = 500

log = logging.getLogger(__name__)


class Notifier:
    """A connection to the service manager. Owns ``connection``, a connected datagram socket.

    Every method that waits raises ManagerUnreachable when the manager is gone, or takes nothing until ``deadline``.
    Descriptors that are passed stay the caller's.
    """

    def __init__(self, connection: socket.socket, *, watchdog_s: float | None, supervised: bool) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._sending = asyncio.Lock()
        self.watchdog_s = watchdog_s
        """How often the manager wants a sign of life, or None."""
        self.supervised = supervised
        """Whether it is `weightcached supervise`, which answers :meth:`kept`."""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Notifier | None:
        """The service manager that started this process, or None when none did.

        Takes what it said out of the environment, so that no child of ours speaks for us. Raises InvalidEnvironment
        or ManagerUnreachable.
        """
        watchdog_s = watchdog_interval_s(environment, pid=os.getpid())
        text, supervisor, *_ = (environment.pop(name, None) for name in _SAID)
        if text is None:
            return None
        address = socket_address(text)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            raise _unreachable(error, where=text) from error
        return cls(connection, watchdog_s=watchdog_s, supervised=supervisor == str(os.getppid()))

    def close(self) -> None:
        """Say nothing more. Nobody may be waiting. Safe to call twice."""
        self._connection.close()

    async def ready(self, status: str) -> None:
        """Weights are served."""
        await self.send({"READY": "1", "STATUS": _shortened(status)})

    async def stopping(self, status: str) -> None:
        """The end has begun, on purpose."""
        await self.send({"STOPPING": "1", "STATUS": _shortened(status)})

    async def store(self, name: str, fd: int, *, deadline: Deadline | None = None) -> None:
        """Ask the manager to keep a descriptor under ``name``. Whether it does shows only later: :meth:`kept`."""
        _require_usable(name)
        await self.send({"FDSTORE": "1", "FDNAME": name, "FDPOLL": "0"}, [fd], deadline=deadline)

    async def remove(self, name: str, *, deadline: Deadline | None = None) -> None:
        """Ask the manager to close every descriptor that it keeps under ``name``."""
        _require_usable(name)
        await self.send({"FDSTOREREMOVE": "1", "FDNAME": name}, deadline=deadline)

    async def barrier(self, *, deadline: Deadline | None = None) -> None:
        """Wait until everything that was said before has been acted upon.

        A manager that dies meanwhile looks the same; the next thing that is said to it tells.
        """
        await self._ask("BARRIER", deadline or Deadline.after(TIMEOUT_S))

    async def kept(self, *, deadline: Deadline | None = None) -> tuple[str, ...]:
        """The name of each descriptor that the manager keeps now, in the order it hands them over in.

        Only for a manager that is ``supervised``: systemd does not answer, which looks like nothing kept. One that dies
        in the middle of its answer looks like less kept, never like more.
        """
        answer = await self._ask(KEPT_QUERY, deadline or Deadline.after(TIMEOUT_S))
        return tuple(line.decode("ascii", "replace") for line in answer.split(b"\n")[:-1])

    def say_status(self, text: str) -> bool:
        """One line about what is going on, for people. At once, or not at all: false when it could not be said."""
        try:
            self._connection.send(encode({"STATUS": _shortened(text)}))
        except OSError as error:
            log.debug("the service manager was not told the status", extra={"reason": str(error)})
            return False
        return True

    async def give_signs_of_life(self) -> NoReturn:
        """Send one twice in each watchdog interval, from the event loop: a loop that hangs is noticed. Runs until
        cancelled; only where there is a ``watchdog_s``.
        """
        if self.watchdog_s is None:
            raise ValueError("the service manager asked for no signs of life")
        while True:
            try:
                await self.send({"WATCHDOG": "1"}, deadline=Deadline.after(self.watchdog_s))
            except ManagerUnreachable as error:
                log.warning("a sign of life was not given", extra=error.as_fields() | {"message": None})
            await asyncio.sleep(self.watchdog_s / 2)

    async def send(
        self, fields: Mapping[str, str], fds: Sequence[int] = (), *, deadline: Deadline | None = None
    ) -> None:
        """Send one datagram. ValueError for fields that are none."""
        data = encode(fields)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        within = deadline or Deadline.after(TIMEOUT_S)
        try:
            async with asyncio.timeout(within.remaining_s()), self._sending:
                while True:
                    try:
                        self._connection.sendmsg([data], control)
                        return
                    except BlockingIOError:
                        await _writable(self._connection)
        except TimeoutError:
            raise ManagerUnreachable(
                "the service manager does not read what it is told",
                expected="room in the queue of its notify socket in time",
                next_step="see whether systemd, or `weightcached supervise`, still runs",
            ) from None
        except OSError as error:
            raise _unreachable(error) from error

    async def _ask(self, key: str, deadline: Deadline) -> bytes:
        """Send ``key=1`` with the writing end of a pipe, and read the pipe until the manager closes it."""
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with OwnedFds([reading]):
            with OwnedFds([writing]):
                await self.send({key: "1"}, [writing], deadline=deadline)
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    return await _read_to_end(reading)
            except TimeoutError:
                raise ManagerUnreachable(
                    "the service manager does not answer", expected=f"an end to {key} in time"
                ) from None


def _shortened(text: str) -> str:
    """One line, well under what is read of a datagram."""
    return one_line(text)[:_STATUS_MAX_CHARACTERS]


def _require_usable(name: str) -> None:
    if not name_is_usable(name):
        raise ValueError(f"a descriptor cannot be called {name!r}")


def _unreachable(error: OSError, *, where: object = None) -> ManagerUnreachable:
    return ManagerUnreachable("the service manager cannot be reached", found=error.strerror, where=where)


async def _writable(connection: socket.socket) -> None:
    """Wait for room in the peer's queue. (The kernel reports that for connected sockets only.)"""
    loop = asyncio.get_running_loop()
    room = loop.create_future()
    loop.add_writer(connection, _wake, room)
    try:
        await room
    finally:
        loop.remove_writer(connection)


async def _read_to_end(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    chunks: list[bytes] = []
    while True:
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(fd, _CHUNK_NBYTES)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            continue
        arrived = loop.create_future()
        loop.add_reader(fd, _wake, arrived)
        try:
            await arrived
        finally:
            loop.remove_reader(fd)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
