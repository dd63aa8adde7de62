"""A process that stands for a keeper below `weightcached supervise`: does what a test tells it, and tells what it got.

    python kept_child.py CONTROL_SOCKET

Speaks the notify protocol with the keeper's own modules (`notify.py`, `listen_fds.py`). Connects to the control socket,
says who it is and what it was handed, then obeys one line of JSON at a time; see :class:`Child` for the words. Signals
that it takes are reported as lines of their own. Driven by `supervised.py`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import signal
import socket
import stat
import sys
from typing import Any

from weightcached.daemon.listen_fds import HandedOver, take_handed_over
from weightcached.daemon.notify import Notifier
from weightcached.daemon.notify_protocol import socket_address
from weightcached.protocol.memory import host

_REPORTED = ("NOTIFY_SOCKET", "WATCHDOG", "LISTEN", "WEIGHTCACHED_SUPERVISOR")


def sealed(text: str) -> int:
    """A sealed memfd with `text` in it."""
    data = text.encode()
    fd = host.allocate(len(data), name="kept")
    os.pwrite(fd, data, 0)
    host.seal(fd)
    return fd


def look_at(name: str, fd: int) -> dict[str, Any]:
    found = os.fstat(fd)
    looked: dict[str, Any] = {"name": name, "fd": fd, "inode": found.st_ino, "inheritable": os.get_inheritable(fd)}
    if stat.S_ISREG(found.st_mode):
        looked["text"] = os.pread(fd, found.st_size, 0).decode()
        looked["seals"] = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    return looked


def fork_orphan() -> int:
    """The pid of a process that waits for ever, and whose parent is gone."""
    reading, writing = os.pipe()
    if (middle := os.fork()) == 0:
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            signal.pause()
        os._exit(0)
    os.waitpid(middle, 0)
    return int(os.read(reading, 16))


class Child:
    """Each method `do_X` is a word: its arguments are the line's other keys, its result the answer."""

    def __init__(self, notifier: Notifier, address: str, handed: HandedOver, writer: asyncio.StreamWriter) -> None:
        self.notifier = notifier
        self.address = address
        self.handed = handed
        self.writer = writer
        self.tasks: list[asyncio.Task[Any]] = []

    def say(self, **words: Any) -> None:
        self.writer.write(json.dumps(words).encode() + b"\n")

    def report(self, number: signal.Signals) -> None:
        self.say(signal=number.name)

    async def do_store(self, name: str, text: str) -> int:
        fd = sealed(text)
        try:
            await self.notifier.store(name, fd)
            return os.fstat(fd).st_ino
        finally:
            os.close(fd)

    async def do_store_and_die(self, texts: dict[str, str]) -> None:
        """As many as the queue takes without waiting are under way when the process is gone."""
        for name, text in texts.items():
            await self.notifier.store(name, sealed(text))
        os.kill(os.getpid(), signal.SIGKILL)

    async def do_store_again(self, name: str, position: int) -> None:
        await self.notifier.store(name, self.handed.fds[position])

    async def do_remove(self, name: str) -> None:
        await self.notifier.remove(name)

    async def do_barrier(self) -> None:
        await self.notifier.barrier()

    async def do_kept(self) -> list[str]:
        return list(await self.notifier.kept())

    async def do_ready(self, status: str) -> None:
        await self.notifier.ready(status)

    async def do_status(self, text: str) -> bool:
        return self.notifier.say_status(text)

    async def do_stopping(self, status: str) -> None:
        await self.notifier.stopping(status)

    async def do_live(self) -> None:
        """Give signs of life from now on."""
        self.tasks.append(asyncio.create_task(self.notifier.give_signs_of_life()))

    async def do_send(self, data: str, pipes: int = 0) -> list[bool]:
        """Send a datagram of any text with the writing ends of `pipes` pipes; whether each is closed by a barrier."""
        ends = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(pipes)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(self.address)
            socket.send_fds(sender, [data.encode()], [end for _, end in ends])
        for _, end in ends:
            os.close(end)
        await self.notifier.barrier()
        closed = []
        for start, _ in ends:
            try:
                closed.append(os.read(start, 65536) == b"")
            except BlockingIOError:
                closed.append(False)
            os.close(start)
        return closed

    async def do_orphan(self) -> bool:
        """A grandchild whose parent ends at once, and then itself; whether it is reaped once it is dead."""
        orphan = fork_orphan()
        dead = os.pidfd_open(orphan)
        os.kill(orphan, signal.SIGKILL)
        await asyncio.to_thread(select.select, [dead], [], [])
        await self.notifier.barrier()  # deaths come before datagrams
        try:
            signal.pidfd_send_signal(dead, 0)
        except ProcessLookupError:
            return True
        return False

    async def do_exit(self, status: int) -> None:
        os._exit(status)

    async def do_exit_after(self, status: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        os._exit(status)


async def main(control: str, environment: dict[str, str]) -> None:
    handed = take_handed_over()
    notifier = Notifier.from_environment()
    assert notifier is not None
    reader, writer = await asyncio.open_unix_connection(control)
    child = Child(notifier, socket_address(environment["NOTIFY_SOCKET"]), handed, writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, child.report, number)
    child.say(
        pid=os.getpid(),
        parent=os.getppid(),
        session=os.getsid(0),
        environment=environment,
        left={name: value for name, value in os.environ.items() if name.startswith(_REPORTED)},
        supervised=notifier.supervised,
        watchdog_s=notifier.watchdog_s,
        handed=[look_at(name, handed.fds[position]) for position, name in enumerate(handed.names)],
        open_fds=sorted(map(int, os.listdir("/proc/self/fd"))),
    )
    while line := await reader.readline():
        words = json.loads(line)
        answer = await getattr(child, f"do_{words.pop('do')}")(**words)
        child.say(answer=answer)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], {name: value for name, value in os.environ.items() if name.startswith(_REPORTED)}))
