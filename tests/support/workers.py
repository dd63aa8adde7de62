"""The real worker process, driven from the keeper's side of its socket pair: for tests of the worker alone.

    with worker() as running:
        planned = running.plan(directory, config)
        ...

Faults come from outside only: signals, limits, files that change. A worker that still runs at the end is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from weightcached.protocol.channel import Channel
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.memory import host
from weightcached.protocol.messages import Message
from weightcached.protocol.worker_messages import (
    KEEPER_TO_WORKER,
    WORKER_TO_KEEPER,
    Failed,
    Job,
    Memory,
    Planned,
    Progress,
)

TIMEOUT_S = 60.0
GENERATION = "0123456789abcdef" * 2
VERSION = "receipts:" + "2" * 64

_Kind = TypeVar("_Kind", bound=Message)


class Running:
    """A worker and our end of its channel. Owns the segments it was given and what it sent."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.fds = OwnedFds()
        self.progress: list[Progress] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def send_job(self, model_dir: Path, config: CacheConfig, *, keeper_pid: int | None = None) -> None:
        self.channel.send(
            Job(
                model_dir=str(model_dir),
                config=config.model_dump(),
                generation=GENERATION,
                keeper_pid=os.getpid() if keeper_pid is None else keeper_pid,
            ),
            deadline=Deadline.after(TIMEOUT_S),
        )

    def plan(self, model_dir: Path, config: CacheConfig) -> Planned:
        """Send the job and take its answer, which must be Planned."""
        self.send_job(model_dir, config)
        return self.expect(Planned)

    def give_memory(self, *segments_nbytes: int) -> int:
        """Allocate the segments and send them. Returns the first one's descriptor, owned here."""
        segments = [host.allocate(nbytes, name="segment") for nbytes in segments_nbytes]
        for fd in segments:
            self.fds.append(fd)
        self.channel.send(
            Memory(version=VERSION, receipts_version=VERSION, digest=None),
            segments,
            deadline=Deadline.after(TIMEOUT_S),
        )
        return segments[0]

    def hear(self) -> Message:
        """The next message; its descriptors are kept. PeerClosed when there is none."""
        frame = self.channel.receive(deadline=Deadline.after(TIMEOUT_S))
        for fd in frame.fds.take_all():
            self.fds.append(fd)
        return frame.message

    def expect(self, kind: type[_Kind]) -> _Kind:
        """The next message that is not progress."""
        while isinstance(message := self.hear(), Progress):
            self.progress.append(message)
        assert isinstance(message, kind), message
        return message

    def stop_at_first_progress(self) -> None:
        """Wait until it loads, and stop it there (SIGSTOP)."""
        assert isinstance(self.hear(), Progress)
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def exit_status(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def failure(self) -> Failed:
        """It must report a failure, exit with 1, and say nothing more."""
        failed = self.expect(Failed)
        assert self.exit_status() == 1
        assert self.is_silent()
        return failed

    def is_silent(self) -> bool:
        """Whether nothing but progress comes until the channel ends."""
        try:
            while isinstance(self.hear(), Progress):
                pass
        except PeerClosed:
            return True
        return False


@contextmanager
def worker(*options: str) -> Iterator[Running]:
    """A freshly started worker, with further ``options``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "weightcached.loader.worker", "--fd", str(theirs.fileno()), *options],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    channel = Channel(ours, outgoing=KEEPER_TO_WORKER, incoming=WORKER_TO_KEEPER)
    running = Running(process, channel)
    try:
        yield running
    finally:
        process.kill()
        process.wait()
        channel.close()
        running.fds.close()
