"""A service manager with a store, in the test's own process: what systemd is for a keeper, and at hand for tampering.

    with Manager(directory) as manager:
        served = manager.start(model, runtime_dir)     # a scripted daemon, handed what is in the store
        served.wait_until("ready")
        served.process.kill()
        manager.remove("g….m")                         # a torn set
        again = manager.start(model, runtime_dir)

It speaks the notify protocol with the supervisor's own mailbox and store, but says nothing of being one: it does not
answer the question what is kept, and keeps what it has when a keeper stops. It is told to keep `store_max` descriptors,
and says so in FDSTORE, as systemd does from 254 on, unless `silent`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.daemons import REAL, SCRIPTED, TIMEOUT_S, Daemon, scripted_environment, start
from weightcached.daemon.notify_protocol import Notification
from weightcached.daemon.supervisor.mailbox import Mailbox
from weightcached.daemon.supervisor.post import Post
from weightcached.daemon.supervisor.store import Store
from weightcached.protocol.fds import OwnedFds

HAND_OVER = Path(__file__).with_name("hand_over.py")


class Manager:
    """Keeps descriptors until it is closed. Daemons that it starts are the caller's to stop, one at a time."""

    def __init__(self, directory: Path, *, store_max: int = 100, silent: bool = False) -> None:
        self._silent = silent
        self._store = Store(limit=store_max)
        self._mailbox = Mailbox(directory)
        self._post = Post(self._mailbox, self._store)
        self._heard = threading.Condition()
        self.said: list[Notification] = []
        self.kill_when_stored: Callable[[str], bool] = lambda name: False
        """Asked about each descriptor once it is kept: whether the daemon is to be killed at that moment."""
        self.handed: tuple[str, ...] = ()
        """Names of what the last daemon was handed."""
        self._pid = -1
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._listen, name="manager", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        waiting = select.poll()
        waiting.register(self._mailbox, select.POLLIN)
        waiting.register(self._wake, select.POLLIN)
        while not any(fd == self._wake for fd, _ in waiting.poll()):
            with self._heard:
                self._read()
                self._heard.notify_all()

    def _read(self) -> None:
        for said in self._post.read(self._pid, 64):
            self.said.append(said)
            if said.store and self.kill_when_stored(said.name):
                os.kill(self._pid, signal.SIGKILL)

    def wait_said(self, wanted: Callable[[Notification], bool]) -> Notification:
        """The first thing that any daemon said that is ``wanted``."""
        with self._heard:
            assert self._heard.wait_for(lambda: any(map(wanted, self.said)), TIMEOUT_S), self.said
            return next(filter(wanted, self.said))

    def start(
        self,
        model_dir: Path,
        runtime_dir: Path,
        *extra: str,
        script: Mapping[str, Any] | None = None,
        real: bool = False,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Daemon:
        """Start a scripted daemon (or a ``real`` one) with everything that is kept, and return at once."""
        with self._heard:
            self._read()  # what the last one had said when it died counts too
            names, fds = self._store.names, self._store.fds
            self.handed = names
            told = {"NOTIFY_SOCKET": self._post.address}
            if not self._silent:
                told["FDSTORE"] = str(self._store.limit)
            shim = (sys.executable, str(HAND_OVER), ",".join(map(str, fds)), ":".join(names))
            started = start(
                model_dir,
                runtime_dir,
                *extra,
                command=(*shim, *(REAL if real else SCRIPTED)),
                environment={**scripted_environment(runtime_dir, script), **told, **(environment or {})},
                pass_fds=fds,
                **options,
            )
            self._pid = started.pid
        return started

    @property
    def names(self) -> list[str]:
        with self._heard:
            return list(self._store.names)

    def named(self, end: str) -> str:
        """The one name that ends so."""
        [name] = [name for name in self.names if name.endswith(end)]
        return name

    def fd(self, name: str) -> int:
        """The descriptor of that name; it stays the manager's."""
        with self._heard:
            return self._store.fds[self._store.names.index(name)]

    def remove(self, name: str) -> None:
        with self._heard:
            assert self._store.remove(name) == 1

    def add(self, name: str, fd: int) -> None:
        """Keep ``fd``, and own it."""
        with self._heard, OwnedFds([fd]) as fds:
            self._store.add(name, fds, 0)

    def replace(self, name: str, fd: int) -> None:
        """Keep another descriptor under that name, and own it."""
        self.remove(name)
        self.add(name, fd)

    def close(self) -> None:
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._mailbox.close()
        self._store.close()

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
