"""Owns the daemon of an engine in mode ``daemon``: starts it, sees that it came up, ends it with the engine.

The daemon is an ordinary `weightcached serve`: others attach to it too, for as long as its engine lives. It ends *with*
this engine: by SIGTERM, waited for, when the engine ends; by the kernel when the engine is killed (the socket file then
stays, and clients that find it say that its daemon died). A cache that is to outlive its engine is started by itself.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import DaemonNotReady, DeploymentError
from weightcached.protocol.peers import peer_of
from weightcached.protocol.places import Place
from weightcached.protocol.processes import python_command

STOP_TIMEOUT_S = 30.0
_LOOK_AGAIN_S = 0.02


class OwnedDaemon:
    """A running child. A context manager: leaving it ends the daemon.

    Made in the main thread, because the kernel ends the daemon when the *thread* that started it ends.
    """

    def __init__(self, place: Place, serve: Sequence[str]) -> None:
        """Starts `weightcached` with the arguments ``serve``, which name ``place``; :meth:`wait_bound` says whether it
        came up. Its log goes to our standard error.
        """
        self.place = place
        command = python_command("weightcached.daemon", *serve)
        command += ["--parent-pid", str(os.getpid())]
        # In a process group of its own: Ctrl-C is for the engine, which ends the daemon in order.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_bound(self, deadline: Deadline) -> None:
        """Returns once the daemon listens; from then on it answers for itself, failures included.

        Raises DeploymentError when it ended instead (its log says why), DaemonNotReady at the deadline.
        """
        pidfd = os.pidfd_open(self._process.pid)
        try:
            while not self._listens():
                # The child's end wakes this at once; a socket file, which makes no noise, is looked for now and then.
                ended, _, _ = select.select([pidfd], [], [], min(_LOOK_AGAIN_S, deadline.remaining_s()))
                if ended:
                    raise DeploymentError(
                        "the daemon that this engine started has ended",
                        expected="a daemon that serves until this engine ends",
                        found=f"exit status {self._process.wait()}",
                        where=self.place.socket_path,
                        next_step="its log, above, has the reason; where another daemon serves this place already, "
                        "use mode client",
                    )
                if deadline.passed:
                    raise DaemonNotReady(
                        "the daemon that this engine started has not bound its socket in time",
                        where=self.place.socket_path,
                        next_step="allow more time (timeout_s, --timeout)",
                    )
        finally:
            os.close(pidfd)

    def _listens(self) -> bool:
        """Whether our child listens at the place: a socket that an earlier daemon left there does not count."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            return probe.connect_ex(str(self.place.socket_path)) == 0 and peer_of(probe).pid == self._process.pid

    def stop(self) -> None:
        """SIGTERM, then waits; SIGKILL after :data:`STOP_TIMEOUT_S`. Safe to call twice."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> OwnedDaemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
