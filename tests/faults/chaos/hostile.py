"""A client that wishes daemons ill: frames that lie, floods, silence, half a frame at a time, for as long as it runs.

    python -m tests.faults.chaos.hostile --seed N SOCKET …

It may do to a daemon whatever a process of an allowed user can do through the socket. It says nothing and remembers
nothing; whether daemons mind is judged by everything else. The end of standard input ends it.
"""

from __future__ import annotations

import argparse
import random
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tests.support.wires import HELLO
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.messages import Ping, Resume, Status
from weightcached.protocol.processes import die_with_parent
from weightcached.protocol.testing import (
    Drip,
    Flood,
    LyingClient,
    Receive,
    ReceiveToEnd,
    Send,
    SendRaw,
    Step,
    frame,
    frame_lies,
)

_PAUSE_S = 0.08
_PATIENCE_S = 0.3
_KEPT_MAX = 40
_EXPECTED = (OSError, PeerClosed, TimeoutError, WeightCacheError)

_RESUME = Resume(client_version="0", name="hostile", pid=1, generation="0" * 32, manifest_sha256="0" * 64)


class Hostile:
    """Acts on one socket of ``paths`` at a time."""

    def __init__(self, paths: list[str], seed: int) -> None:
        self._paths = paths
        self._random = random.Random(seed)
        self._lies = [
            lie
            for message in (HELLO, Ping(token=1), _RESUME)
            for lie in frame_lies(message, pickle_target="/nonexistent/p").values()
        ]
        self._silent: deque[socket.socket] = deque()
        self._acts: list[Callable[[str], None]] = [
            self._lie,
            self._lie,
            self._come_and_go,
            self._stay_silent,
            self._drip,
            self._flood,
            self._ask_much,
            self._send_descriptor,
        ]

    def act(self) -> None:
        with suppress(*_EXPECTED):
            self._random.choice(self._acts)(self._random.choice(self._paths))

    def _run(self, path: str, *steps: Step) -> None:
        with LyingClient(path, timeout_s=_PATIENCE_S) as client:
            client.run(*steps)

    def _lie(self, path: str) -> None:
        self._run(path, SendRaw(self._random.choice(self._lies)), ReceiveToEnd())

    def _come_and_go(self, path: str) -> None:
        for _ in range(10):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_PATIENCE_S)
                connection.connect(path)

    def _stay_silent(self, path: str) -> None:
        """Some stay for as long as the daemon bears it."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._silent.append(connection)
        connection.settimeout(_PATIENCE_S)
        connection.connect(path)
        while len(self._silent) > _KEPT_MAX:
            self._silent.popleft().close()

    def _drip(self, path: str) -> None:
        self._run(path, Drip(frame(Status())[:20], nbytes_each=1, every_s=0.005))

    def _flood(self, path: str) -> None:
        self._run(path, Flood(frame(Status()), patience_s=0.02))

    def _ask_much(self, path: str) -> None:
        self._run(path, SendRaw(frame(Ping(token=1)) * 50), *[Receive()] * 50)

    def _send_descriptor(self, path: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            self._run(path, Send(Status(), fds=[stranger.fileno()]), ReceiveToEnd())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("sockets", nargs="+")
    given = parser.parse_args()
    die_with_parent(given.parent_pid)
    hostile = Hostile(given.sockets, given.seed)
    while not select.select([0], [], [], _PAUSE_S)[0]:
        hostile.act()


if __name__ == "__main__":
    main()
