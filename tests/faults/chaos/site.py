"""One place of a run: its supervisor and keeper.

Owns these processes and the order of bringing them up. Faults act through it; nothing here judges.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.chaos import processes
from tests.faults.chaos.broken import Broken
from tests.faults.chaos.records import Record, Records
from tests.support.daemons import ask, connect
from tests.support.unprivileged import ROOT
from weightcached.protocol.control import Describe, RankState, Resolve
from weightcached.protocol.control_channel import ask_blocking
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.messages import Report, Status
from weightcached.protocol.places import Place, host_device

if TYPE_CHECKING:
    from tests.faults.chaos.group import Group

READY_S = 60.0
"""Within which a place has to serve again, whatever happened to it: generous, the machine is busy."""
WATCHDOG_S = 4.0
EXCHANGE_TIMEOUT_S = 3.0
_PAUSE_S = 0.01


@dataclass(frozen=True)
class Folders:
    """Where a run keeps things."""

    run: Path
    """The runtime directory."""
    digests: Path
    notify: Path
    logs: Path


class Site:
    """Made once; its supervisor may be started many times."""

    group: Group
    """Set by the group that it becomes part of."""

    def __init__(
        self,
        name: str,
        model: Path,
        folders: Folders,
        *,
        keeper: Sequence[str],
        environment: dict[str, str],
        rank: int = 0,
        size: int = 1,
        options: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.rank = rank
        self.label = name if size == 1 else f"{name} {rank}"
        self.folders = folders
        self.place = Place(folders.run, name, host_device(tp_size=size, tp_rank=rank))
        self.generation: str | None = None
        """What it served when it was last looked at."""
        self.held: frozenset[str] = frozenset()
        """What it held then."""
        self.generation_nbytes = 0
        """Memory behind one generation."""
        self.committed_to = 0
        """The position in ``records`` up to which changes were counted."""
        self.own_mib: tuple[int, float] = (0, 0.0)
        """A keeper, and its own memory when it was first looked at."""
        self.listening_s = 0.0
        """When the latest supervisor's first keeper was seen to listen: from then on nobody may find the place absent
        or deserted, as long as that supervisor lives."""
        self.levels: dict[str, Counter[str]] = {}
        """Descriptors of keeper and supervisor when nothing was going on."""
        self._keeper = tuple(keeper)
        self._options = [*("--model", str(model), "--tp-size", str(size), "--tp-rank", str(rank)), *options]
        self._environment = environment
        self._supervisor: subprocess.Popen[str] | None = None
        self.records: Records

    # The supervisor

    def start(self) -> None:
        """Start a supervisor; returns when its keeper listens, which is before it has weights."""
        self.launch()
        self.wait_listening()

    def launch(self) -> None:
        """Start a supervisor, and return at once."""
        self._supervisor = subprocess.Popen(
            [
                *(sys.executable, "-m", "weightcached.daemon", "supervise", "--log-format", "json"),
                *("--backoff-max", "0.2", "--watchdog", str(WATCHDOG_S), "--parent-pid", str(os.getpid())),
                *("--", *self._keeper),
                *(*self._options, "--runtime-dir", str(self.folders.run)),
                *("--name", self.name, "--cache-dir", str(self.folders.digests), "--log-format", "json"),
                *("--exchange-timeout", str(EXCHANGE_TIMEOUT_S), "--drain-timeout", "2"),
            ],
            cwd=ROOT,
            env={**self._environment, "TMPDIR": str(self.folders.notify)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._supervisor.stderr is None:
            raise ValueError("a process that was started with pipes has them")
        self.committed_to = 0
        self.records = Records(self._supervisor.stderr, who=f"daemon {self.label}")

    def wait_listening(self) -> None:
        self.records.wait(
            lambda record: record.get("message") == "listening", what="it to listen", mark=0, timeout_s=READY_S
        )
        self.listening_s = time.monotonic()

    @property
    def supervisor(self) -> subprocess.Popen[str]:
        if self._supervisor is None:
            raise ValueError("no supervisor was started yet")
        return self._supervisor

    def wait_exit(self, timeout_s: float) -> int:
        """The supervisor's exit status."""
        try:
            status = self.supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Broken("progress", f"supervisor of {self.label} did not end within {timeout_s:g} s") from None
        self.records.join()
        return status

    def kill_supervisor(self) -> None:
        """Its keeper has to go with it. What it leaves in the folder for notify sockets is cleared away here."""
        keeper = self.keeper_pid()
        self.supervisor.kill()
        self.supervisor.wait()
        self.wait_gone(keeper)
        self.records.join()
        for folder in self.folders.notify.iterdir():
            if str(folder) not in Path("/proc/net/unix").read_text():
                (folder / "notify").unlink(missing_ok=True)
                folder.rmdir()

    def command(self, name: str, *arguments: str) -> None:
        """Run a `weightcached` command on this place; it has to succeed."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "weightcached.daemon", name, "--runtime-dir", str(self.folders.run)),
                *("--name", self.name, *arguments),
            ],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise Broken("exit", f"{name} {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")

    # The keeper and its helpers

    def keeper_pid(self) -> int:
        return self.wait_until(self._keeper_now, "a keeper runs")

    def _keeper_now(self) -> int | None:
        return next(iter(processes.children(self.supervisor.pid)), None)

    def worker_pid(self) -> int:
        return self.wait_until(self._worker_now, "a worker runs")

    def worker_unless(self, over: Callable[[], bool]) -> int | None:
        """A worker, once there is one; ``None`` where it is ``over`` before."""
        return self.wait_until(lambda: self._worker_now() or (0 if over() else None), "a worker runs") or None

    def _worker_now(self) -> int | None:
        keeper = self._keeper_now()
        if keeper is None:
            return None
        return next((pid for pid in processes.children(keeper) if "loader.worker" in processes.command(pid)), None)

    def committed(self) -> int:
        """How many changes it has said it committed since it was last asked."""
        fresh = self.records.since(self.committed_to)
        self.committed_to += len(fresh)
        return sum(one.get("message") == "change" and one.get("change") == "committed" for one in fresh)

    def wait_until(self, found: Callable[[], int | None], what: str) -> int:
        """Poll what no event tells: another process's children."""
        deadline_s = time.monotonic() + READY_S
        while (value := found()) is None:
            if time.monotonic() > deadline_s:
                raise Broken("progress", f"{self.label}: waited {READY_S:g} s until {what}")
            time.sleep(_PAUSE_S)
        return value

    def wait_gone(self, pid: int) -> None:
        self.wait_until(lambda: None if processes.alive(pid) else 0, f"process {pid} is gone")

    def wait_state(self, state: str, mark: int) -> Record:
        """Until the keeper says that it is in ``state``."""

        def wanted(record: Record) -> bool:
            return record.get("message") == "state" and record.get("state") == state

        return self.records.wait(wanted, what=f"state {state}", mark=mark, timeout_s=READY_S)

    def wait_ready(self, mark: int) -> None:
        self.wait_state("ready", mark)

    def report(self) -> Report:
        report, _ = self.look()
        return report

    def look(self) -> tuple[Report, Counter[str]]:
        """The keeper's account of itself, and its descriptors at that moment, our connection among them."""
        try:
            channel = connect(self.place)
            try:
                answer = ask(channel, Status(), timeout_s=READY_S)
                if not isinstance(answer, Report):
                    raise Broken("status", f"{self.label} answered {answer!r}")
                return answer, processes.descriptors(answer.pid)
            finally:
                channel.close()
        except (OSError, PeerClosed, TimeoutError, WeightCacheError) as error:
            raise Broken("status", f"{self.label} did not answer: {error!r}") from error

    def state(self) -> RankState:
        """What it holds, as it says on the control plane, which is there some time after it serves."""
        return self._ask(Describe())

    def read_decision(self) -> None:
        """Have it look for the decision about its change, and act upon it."""
        if (change := self.state().change) is not None:
            self._ask(Resolve(transaction=change.transaction))

    def _ask(self, request: Describe | Resolve) -> RankState:
        try:
            return ask_blocking(self.place, request, RankState, deadline=Deadline.after(READY_S), patience_s=READY_S)
        except WeightCacheError as error:
            raise Broken("control", f"{self.label} did not answer: {error!r}") from error

    def end(self) -> None:
        """By force where it must be."""
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.send_signal(signal.SIGCONT)
            self._supervisor.kill()
            self._supervisor.wait()
