"""Who runs a script: a daemon for clients under test, a client for daemons under test. Over real sockets.

Owns :class:`LyingDaemon` (threads of this process) and :class:`LyingClient` (the caller's thread). For tests.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Message
from weightcached.protocol.testing.steps import Step, Wire

Script = Sequence[Step]


class LyingDaemon:
    """Listens at ``path`` for the length of a ``with`` block, and follows a script on each connection.

    The first connection gets the first script, and so on; the last script serves all that follow. A connection closes
    when its script ends, or earlier when the peer closes it. At the end of the block every connection is closed, every
    thread joined, the socket file gone; what a step raised besides ConnectionError is raised again.
    """

    def __init__(self, path: str | os.PathLike[str], *scripts: Script, timeout_s: float = 30.0) -> None:
        if not scripts:
            raise ValueError("a lying daemon needs at least one script")
        self.path = Path(path)
        self.wires: list[Wire] = []
        """One for each connection so far: ``wires[0].messages`` is what the first client said."""
        self._scripts = scripts
        self._timeout_s = timeout_s
        self._failures: list[Exception] = []
        self._dead = False
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._acceptor = threading.Thread(target=self._accept, name="lying daemon")
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> LyingDaemon:
        try:
            self._listener.bind(str(self.path))
        except OSError:
            self._listener.close()
            raise
        self._listener.listen()
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._die()
        self._acceptor.join()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for wire in self.wires:
            wire.close()
        self.path.unlink(missing_ok=True)
        if self._failures and error is None:
            raise self._failures[0]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down by _die
                return
            channel = Channel(connection, outgoing=DAEMON_TO_CLIENT, incoming=CLIENT_TO_DAEMON)
            wire = Wire(channel, Deadline.after(self._timeout_s), self._die)
            with self._lock:
                if self._dead:
                    wire.close()
                    return
                script = self._scripts[min(len(self.wires), len(self._scripts) - 1)]
                self.wires.append(wire)
            thread = threading.Thread(target=self._follow, args=(script, wire), name="lying daemon's script")
            self._threads.append(thread)
            thread.start()

    def _follow(self, script: Script, wire: Wire) -> None:
        try:
            for step in script:
                step.run(wire)
        except ConnectionError:
            pass  # the peer went away, or this daemon died: either ends a script
        except Exception as error:  # noqa: BLE001  # raised again in the test's own thread
            self._failures.append(error)
        finally:
            wire.hang_up()

    def _die(self) -> None:
        with self._lock:
            self._dead = True
            self._listener.shutdown(socket.SHUT_RDWR)
            for wire in self.wires:
                wire.cut()


class LyingClient:
    """Connects to the daemon at ``path`` for the length of a ``with`` block, and takes steps when told to run them."""

    def __init__(self, path: str | os.PathLike[str], *, timeout_s: float = 30.0) -> None:
        self._path = str(path)
        self._timeout_s = timeout_s
        self._wire: Wire | None = None

    def __enter__(self) -> LyingClient:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._timeout_s)
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        channel = Channel(connection, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
        self._wire = Wire(channel, Deadline.after(self._timeout_s), channel.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wire.close()

    @property
    def wire(self) -> Wire:
        """The connection. Its ``frames`` hold every message received, and the descriptors that came with it."""
        if self._wire is None:
            raise ValueError("a lying client is connected only within its with block")
        return self._wire

    def run(self, *steps: Step) -> list[Message]:
        """Follow the steps, blocking, and return the messages received by them. Raises what a step raises."""
        before = len(self.wire.frames)
        for step in steps:
            step.run(self.wire)
        return self.wire.messages[before:]
