"""One ``weightcached@`` instance in a box: its settings, its systemd side, and its socket as seen from out here."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.daemons import Log, ask, connect, converse, hello_for
from tests.systemd.box import TIMEOUT_S, Box
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.messages import Grant, Hello, Report, Status
from weightcached.protocol.places import Place, host_device

RUNTIME_DIR = "/run/weightcached"


@dataclass(frozen=True)
class Service:
    """``weightcached@INSTANCE.service`` for one rank of ``model``, a path inside."""

    box: Box
    instance: str
    model: str
    digest: str
    tp_rank: int = 0
    tp_size: int = 1
    name: str = "default"
    layout: str = "fused"

    @property
    def unit(self) -> str:
        return f"weightcached@{self.instance}.service"

    @property
    def place(self) -> Place:
        """As seen from out here."""
        device = host_device(tp_size=self.tp_size, tp_rank=self.tp_rank)
        return Place(self.box.path(RUNTIME_DIR), self.name, device)

    @property
    def settings(self) -> str:
        """The folder of files that override the unit for this instance."""
        return f"/etc/systemd/system/{self.unit}.d"

    def systemctl(self, verb: str, *options: str, ok: bool = True) -> None:
        self.box.run("systemctl", verb, *options, self.unit, ok=ok)

    def show(self, key: str) -> str:
        return self.box.show(self.unit, key)

    def user_id(self) -> str:
        """The services' user in the box."""
        return self.box.run("id", "-u", "weightcached").stdout.strip()

    def report(self) -> Report:
        """Its own account of itself."""
        channel = connect(self.place)
        try:
            message = ask(channel, Status())
        finally:
            channel.close()
        assert isinstance(message, Report), message
        return message

    def hello(self) -> Hello:
        """What an engine says that knows its checkpoint's digest: it is granted as soon as there is something."""
        model = self.box.path(self.model)
        return hello_for(model, layout=self.layout, tp_size=self.tp_size, tp_rank=self.tp_rank, digest=self.digest)

    def attach(self, hello: Hello, *, other_than: str | None = None) -> Grant:
        """Be granted, by another keeper than the one with the nonce ``other_than``. Waits in the backlog, and for the
        load; comes again when the keeper dies meanwhile.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            assert time.monotonic() < deadline, f"nobody grants:\n{self.box.log(self.unit)}"
            channel = connect(self.place)
            try:
                frame = converse(channel, hello)
            except (PeerClosed, ConnectionError):
                continue
            finally:
                channel.close()
            frame.fds.close()
            assert isinstance(frame.message, Grant), frame.message
            if frame.message.nonce != other_than:
                return frame.message

    def kill(self, number: int = signal.SIGKILL) -> float:
        """Signal the main process; when that was (monotonic)."""
        pid = self.box.main_pid(self.unit)
        killed_at = time.monotonic()
        os.kill(pid, number)
        return killed_at

    def await_death(self, pid: int) -> None:
        """Until the process, seen from out here, is dead."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            assert select.select([fd], [], [], TIMEOUT_S)[0], f"{pid} lives on"
        finally:
            os.close(fd)

    @contextmanager
    def overridden(self, text: str) -> Iterator[None]:
        """With these lines in the unit's [Service] section, from its next start on."""
        self.box.write(f"{self.settings}/overridden.conf", f"[Service]\n{text}\n")
        self.box.run("systemctl", "daemon-reload")
        try:
            yield
        finally:
            self.box.path(f"{self.settings}/overridden.conf").unlink()
            self.box.run("systemctl", "daemon-reload")

    def attach_loop(self) -> AbstractContextManager[Loop]:
        """`attach_loop.py` on this rank."""
        return looping(self.box, "attach_loop.py", self.model, self.tp_rank, self.tp_size, self.user_id())


@contextmanager
def looping(box: Box, program: str, *words: object) -> Iterator[Loop]:
    """A program of this folder that, in the box, does something until its standard input ends, and says each time how
    that went. It must have seen no error in the end.
    """
    with box.started("python", Path(__file__).with_name(program), *map(str, words)) as started:
        loop = Loop(started.log)
        loop.await_more(1)
        yield loop
        assert (started.end(), loop.errors) == (0, [])


class Loop:
    """What such a program has said so far."""

    def __init__(self, log: Log) -> None:
        self._log = log

    @property
    def done(self) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, list(self._log.lines)) if "error" not in line]

    @property
    def errors(self) -> list[str]:
        return [line["error"] for line in map(json.loads, list(self._log.lines)) if "error" in line]

    def await_more(self, count: int) -> None:
        """Until it was done so many more times, without an error."""
        wanted = len(self._log.lines) + count
        self._log.wait_for(lambda line: "error" in line or len(self._log.lines) >= wanted)
        assert self.errors == []


ATTACH = """
import sys
from weightcached.client import attach
model, name = sys.argv[1:3]
rank, size, uid = map(int, sys.argv[3:])
try:
    with attach(model, layout="fused", tp_rank=rank, tp_size=size, name=name, allow_uids=[uid]) as weights:
        weights.verify()
        print(weights.source, weights.generation)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def attach_in_box(service: Service, *, user: str = "root", group: str = "root") -> str:
    """What an engine of that user's and group's gets in the box: the source and the generation, or its error."""
    identity = ("setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "env", "HOME=/nonexistent")
    words = (service.model, service.name, str(service.tp_rank), str(service.tp_size), service.user_id())
    return service.box.run(*identity, "python", "-c", ATTACH, *words).stdout.strip()
