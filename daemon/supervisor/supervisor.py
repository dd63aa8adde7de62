"""The supervisor: one keeper at a time, started again until it ends well or is told to end, and its descriptors.

Owns the loop. It waits for four things at once (a signal, a datagram, room for one upwards, a moment) and does what is
due, in this order: signals, deaths, datagrams, moments. Nothing in it blocks. What it keeps, how it starts a process
and what a datagram says are other modules' business.

What is promised: whatever the keeper had sent when it died is acted upon before the next one starts, even after
kill -9, because the dead keeper is not reaped before the notify socket is empty; until then nobody else can have its
pid, which its datagrams carry. Not promised: anything after this process's own death; the keeper and all that is kept
go with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from weightcached.daemon.notify_protocol import (
    MANAGED_VARIABLES,
    SUPERVISOR_VARIABLE,
    Notification,
)
from weightcached.daemon.supervisor.backoff import FIRST_S, BackOff
from weightcached.daemon.supervisor.options import SuperviseOptions
from weightcached.daemon.supervisor.post import Post
from weightcached.daemon.supervisor.spawn import CANNOT_EXEC_EXIT, spawn
from weightcached.daemon.supervisor.store import Store
from weightcached.daemon.supervisor.upward import Upward
from weightcached.daemon.text import one_line
from weightcached.protocol.command_line import USAGE_EXIT

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_STOP = (signal.SIGTERM, signal.SIGINT)
_HOPELESS_EXITS = (USAGE_EXIT, CANNOT_EXEC_EXIT)
"""Starting again will not help. But a keeper whose new release refuses its options must not cost what is kept."""

_DATAGRAMS_PER_TURN = 64
_DATAGRAMS_MAX = 4096
"""More than any queue holds: one that somebody keeps filling cannot keep us from starting the next keeper."""
_STATUS_MAX_CHARACTERS = 500

log = logging.getLogger(__name__)


@dataclass
class Keeper:
    """The process that runs now."""

    pid: int
    started_s: float
    alive_s: float | None = None
    """When it last gave a sign of life. None, and not watched, until it says that it is ready or gives the first."""
    stopping: bool = False
    """It owes no more signs of life: draining takes as long as it takes, and who wants it to hurry says stop twice."""


class Supervisor:
    """Made once; :meth:`run` once. What it is given stays the caller's."""

    def __init__(self, options: SuperviseOptions, *, post: Post, store: Store, upward: Upward, wake_fd: int) -> None:
        self._options = options
        self._post = post
        self._store = store
        self._upward = upward
        self._wake_fd = wake_fd
        self._watchdog_s = options.watchdog_s or upward.watchdog_s
        self._backoff = BackOff(max_s=options.backoff_max_s, reset_s=options.backoff_reset_s)
        self._environment = _environment(post, self._watchdog_s)
        self._keeper: Keeper | None = None
        self._stops = 0
        self._start_at_s: float | None = time.monotonic()
        self._kill_at_s: float | None = None
        self._life_sign_at_s = time.monotonic()
        self._exit_status: int | None = None

    def run(self) -> int:
        """Supervise to the end; the exit status."""
        while self._exit_status is None:
            self._wait()
            self._take_signals()
            self._bury()
            self._read_mail(_DATAGRAMS_PER_TURN)
            self._upward.flush()
            self._keep_appointments()
        return self._exit_status

    # Waiting

    def _wait(self) -> None:
        waiting = select.poll()
        waiting.register(self._wake_fd, select.POLLIN)
        waiting.register(self._post, select.POLLIN)
        if self._upward.waiting_fd is not None:
            waiting.register(self._upward.waiting_fd, select.POLLOUT)
        at_s = min((at_s for at_s in self._appointments() if at_s is not None), default=None)
        waiting.poll(None if at_s is None else max(0.0, at_s - time.monotonic()) * 1000)

    def _appointments(self) -> tuple[float | None, ...]:
        return (
            self._start_at_s,
            self._kill_at_s,
            self._watchdog_at_s(),
            self._life_sign_at_s if self._upward.watchdog_s is not None else None,
        )

    def _watchdog_at_s(self) -> float | None:
        keeper = self._keeper
        if self._watchdog_s is None or keeper is None or keeper.alive_s is None or keeper.stopping:
            return None
        return keeper.alive_s + self._watchdog_s

    def _keep_appointments(self) -> None:
        now_s = time.monotonic()
        if self._upward.watchdog_s is not None and self._life_sign_at_s <= now_s:
            self._upward.say({"WATCHDOG": "1"})
            self._life_sign_at_s = now_s + self._upward.watchdog_s / 2
        watchdog_at_s = self._watchdog_at_s()
        if watchdog_at_s is not None and watchdog_at_s <= now_s:
            self._kill(f"no sign of life for {self._watchdog_s:g} s")
        if self._kill_at_s is not None and self._kill_at_s <= now_s:
            self._kill("it was told to stop twice and did not")
        if self._start_at_s is not None and self._start_at_s <= now_s and self._exit_status is None:
            self._start()

    # The keeper's life

    def _start(self) -> None:
        self._start_at_s = None
        try:
            pid = spawn(
                self._options.command,
                environment=self._environment,
                names=self._store.names,
                fds=self._store.fds,
                caught=CAUGHT,
            )
        except OSError as error:  # no process, no memory: they may come back, and what is kept must not go
            pause_s = max(self._backoff.pause_after(0.0), FIRST_S)
            log.error("the keeper cannot be started", extra={"reason": error.strerror, "again_after_s": pause_s})
            self._start_at_s = time.monotonic() + pause_s
            return
        self._keeper = Keeper(pid, time.monotonic())
        log.info("keeper started", extra={"keeper_pid": pid, "handed_over": len(self._store)})

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wake_fd, 4096):
                if number in _STOP:
                    self._stop(signal.Signals(number))
                elif number == signal.SIGHUP and self._keeper is not None:
                    os.kill(self._keeper.pid, number)

    def _stop(self, number: signal.Signals) -> None:
        self._stops += 1
        log.info("told to stop", extra={"signal": number.name, "times": self._stops})
        self._upward.say({"STOPPING": "1"})
        if self._keeper is None:
            self._exit_status = 0
            return
        os.kill(self._keeper.pid, number)  # dead or not, it is not reaped: the pid is still its own
        if self._stops == 2:
            self._kill_at_s = time.monotonic() + self._options.stop_timeout_s

    def _kill(self, reason: str) -> None:
        self._kill_at_s = None
        if self._keeper is not None:
            log.error("killing the keeper", extra={"keeper_pid": self._keeper.pid, "reason": reason})
            self._keeper.alive_s = None
            os.kill(self._keeper.pid, signal.SIGKILL)

    def _bury(self) -> None:
        """Reap whoever is dead: the keeper, and as PID 1 also processes that nobody else is left to reap."""
        with contextlib.suppress(ChildProcessError):
            while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                keeper = self._keeper
                if keeper is not None and dead.si_pid == keeper.pid:
                    self._read_mail(_DATAGRAMS_MAX)
                    self._keeper = None
                    _, status = os.waitpid(keeper.pid, 0)
                    self._keeper_died(keeper, os.waitstatus_to_exitcode(status))
                else:
                    os.waitpid(dead.si_pid, 0)

    def _keeper_died(self, keeper: Keeper, code: int) -> None:
        """``code`` is negative for a signal, as in ``subprocess``."""
        self._kill_at_s = None
        lived_s = time.monotonic() - keeper.started_s
        how = f"exit status {code}" if code >= 0 else f"killed by {_signal_name(-code)}"
        fields = {"keeper_pid": keeper.pid, "how": how, "lived_s": round(lived_s, 3), "kept": len(self._store)}
        hopeless = code in _HOPELESS_EXITS and not len(self._store)
        if self._stops or code == 0 or hopeless:
            self._exit_status = code if code >= 0 else 128 - code
            log.log(logging.ERROR if hopeless else logging.INFO, "keeper ended", extra=fields)
            return
        pause_s = self._backoff.pause_after(lived_s)
        self._start_at_s = time.monotonic() + pause_s
        log.warning("keeper died: starting it again", extra=fields | {"after_s": pause_s})
        self._upward.say({"STATUS": f"the keeper died ({how}); starting it again in {pause_s:g} s"})

    # What the keeper says

    def _read_mail(self, limit: int) -> None:
        if self._keeper is None:
            self._post.refuse_all(limit)
            return
        for said in self._post.read(self._keeper.pid, limit):
            self._note_life(self._keeper, said)
            self._pass_on(said)

    def _note_life(self, keeper: Keeper, said: Notification) -> None:
        if said.ready or said.alive:
            keeper.alive_s = time.monotonic()
        if said.stopping:
            keeper.stopping = True
        if said.hung:
            self._kill("it reports that it hangs")

    def _pass_on(self, said: Notification) -> None:
        fields = {}
        if said.ready:
            fields["READY"] = "1"
        if said.stopping:
            fields["STOPPING"] = "1"
        if said.status is not None:
            fields["STATUS"] = one_line(said.status)[:_STATUS_MAX_CHARACTERS]
        if said.errno is not None:
            fields["ERRNO"] = str(said.errno)
        self._upward.say(fields)


def _environment(post: Post, watchdog_s: float | None) -> dict[str, str]:
    """The keeper's: ours, but what our own service manager said to us."""
    said: Mapping[str, str] = {"NOTIFY_SOCKET": post.address, SUPERVISOR_VARIABLE: str(os.getpid())}
    ours = {name: value for name, value in os.environ.items() if name not in MANAGED_VARIABLES}
    if watchdog_s is not None:
        said = {**said, "WATCHDOG_USEC": str(round(watchdog_s * 1e6))}
    return {**ours, **said}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
