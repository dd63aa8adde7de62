"""What a fault is, and those that strike running processes: keepers, supervisors, engines.

Each strikes one site and returns when the site has had its chance to be well again. What an engine may meet meanwhile
beside weights from the daemon is said by ``permits``: codes of errors, ``disk``, and ``absent`` (the path itself). A
fault that says nothing has to go unnoticed by every attach.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from typing import ClassVar, Literal

from tests.faults.chaos import processes
from tests.faults.chaos.broken import Broken
from tests.faults.chaos.engines import HEARTBEAT_S
from tests.faults.chaos.site import Site
from tests.faults.chaos.world import World
from weightcached.daemon.custody import ATTEMPTS_MAX
from weightcached.protocol.errors import (
    CheckpointMismatch,
    DaemonAbsent,
    DaemonDraining,
    DaemonNotReady,
    DaemonUnreachable,
    RanksDisagree,
)
from weightcached.protocol.messages import Status
from weightcached.protocol.testing import frame

ABSENT = "absent"
DISK = "disk"
STOP_S = 20.0
STOPPED = frozenset({ABSENT, DISK, DaemonAbsent.code, DaemonDraining.code, DaemonUnreachable.code})
DISAGREE = frozenset({CheckpointMismatch.code, RanksDisagree.code})
"""What an engine of a group may meet while ranks serve different versions, because one has lost its vault."""
_NOTICED_SLACK_S = 2.0


class Fault(ABC):
    """One kind of fault; made anew each time it strikes."""

    weight: ClassVar[int] = 1
    permits: ClassVar[frozenset[str]] = frozenset()
    keeps_weights: ClassVar[bool] = True
    """Whether the same generation has to be served after it."""
    needs_small_disk: ClassVar[bool] = False
    at: ClassVar[Literal["any", "single", "changing"]] = "any"
    """Which places it strikes: those by themselves, those of a group that is changed, or both."""

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @abstractmethod
    def strike(self, world: World, site: Site) -> None:
        """Do it, and wait until the place serves again. Raises Broken."""


def kill_keeper(world: World, site: Site) -> None:
    """kill -9, and until its successor serves."""
    pid, mark = site.keeper_pid(), site.records.mark()
    began_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    site.wait_ready(mark)
    world.figures.back_seconds.append(time.monotonic() - began_s)


class KillKeeper(Fault):
    weight = 12

    def strike(self, world: World, site: Site) -> None:
        kill_keeper(world, site)


class KillKeeperWhileAdopting(Fault):
    """Its successor too, at some moment of its first half second."""

    weight = 6

    def strike(self, world: World, site: Site) -> None:
        mark = site.records.mark()
        os.kill(site.keeper_pid(), signal.SIGKILL)
        started = site.records.wait(
            lambda record: record.get("message") == "keeper started",
            what="the next keeper",
            mark=mark,
            timeout_s=STOP_S,
        )
        time.sleep(world.random.uniform(0, 0.5))
        mark = site.records.mark()
        os.kill(started["keeper_pid"], signal.SIGKILL)
        site.wait_ready(mark)


class KillKeeperUntilQuarantine(Fault):
    """Again and again while it adopts. When that was too often, what came back is not touched any more but kept, and
    the weights are loaded anew; an operator then gives up what is in quarantine.
    """

    weight = 1
    keeps_weights = False
    at = "single"

    def strike(self, world: World, site: Site) -> None:
        mark = site.records.mark()
        os.kill(site.keeper_pid(), signal.SIGKILL)
        for _ in range(ATTEMPTS_MAX):
            site.wait_state("adopting", mark)
            victim, mark = site.keeper_pid(), site.records.mark()
            os.kill(victim, signal.SIGKILL)
        site.wait_ready(mark)
        if site.report().quarantined:
            world.figures.lease_events["quarantine"] += 1
            site.command("release", "--quarantined", "--tp-size", "1")


class KillKeeperInsideAttach(Fault):
    """While an engine waits for its answer: it goes on with the next keeper."""

    weight = 6

    def strike(self, world: World, site: Site) -> None:
        pid = site.keeper_pid()
        os.kill(pid, signal.SIGSTOP)
        site.group.one("loop").wait_inside()
        mark = site.records.mark()
        os.kill(pid, signal.SIGKILL)
        site.wait_ready(mark)


class PauseKeeper(Fault):
    """SIGSTOP, SIGCONT. When it lasts long enough a holding engine has to say that it lost it, in time."""

    weight = 6

    def strike(self, world: World, site: Site) -> None:
        pid, holder = site.keeper_pid(), site.group.one("hold")
        mark, began_s = holder.records.mark(), time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            if world.random.random() < 0.4:
                lost = holder.records.wait(
                    lambda record: record.get("event") == "lost",
                    what="it to notice a stopped keeper",
                    mark=mark,
                    timeout_s=2 * HEARTBEAT_S + _NOTICED_SLACK_S,
                )
                world.figures.noticed_seconds.append(lost["at_s"] - began_s)
            else:
                time.sleep(world.random.uniform(0.05, 0.8))
        finally:
            with suppress(ProcessLookupError):  # on a busy machine the watchdog may have been quicker
                os.kill(pid, signal.SIGCONT)


class HangKeeper(Fault):
    """SIGSTOP for good: the supervisor's watchdog ends it."""

    weight = 1

    def strike(self, world: World, site: Site) -> None:
        mark = site.records.mark()
        os.kill(site.keeper_pid(), signal.SIGSTOP)
        site.wait_ready(mark)


class PauseSupervisor(Fault):
    """The keeper dies while nobody is there to start another."""

    weight = 4

    def strike(self, world: World, site: Site) -> None:
        keeper, mark = site.keeper_pid(), site.records.mark()
        site.supervisor.send_signal(signal.SIGSTOP)
        try:
            os.kill(keeper, signal.SIGKILL)
            time.sleep(world.random.uniform(0.05, 0.4))
        finally:
            site.supervisor.send_signal(signal.SIGCONT)
        site.wait_ready(mark)


class KillHoldingEngine(Fault):
    weight = 4

    def strike(self, world: World, site: Site) -> None:
        site.group.replace(site.group.one("hold"), world.random)


class KillLoopingEngine(Fault):
    weight = 4

    def strike(self, world: World, site: Site) -> None:
        site.group.replace(site.group.one("loop"), world.random)


class KillForkedEngine(Fault):
    """Its child lives on, and holds no lease."""

    weight = 3

    def strike(self, world: World, site: Site) -> None:
        engine = site.group.one("hold")
        child = engine.fork()
        world.forked.add(child)
        try:
            site.group.replace(engine, world.random)
            site.wait_until(lambda: self._lease_ended(site, engine.pid), "the lease of a dead engine has ended")
        finally:
            os.kill(child, signal.SIGKILL)
            world.forked.discard(child)

    def _lease_ended(self, site: Site, pid: int) -> int | None:
        return None if any(lease.pid == pid for lease in site.report().leases) else 0


class PauseEngine(Fault):
    weight = 3

    def strike(self, world: World, site: Site) -> None:
        world.random.choice(site.group.engines).pause(world.random.uniform(0.1, 1.0))


class LimitDescriptors(Fault):
    """The keeper may have no more descriptors than it has (or one, or two) for a moment."""

    weight = 6
    permits = frozenset({DaemonNotReady.code})

    def strike(self, world: World, site: Site) -> None:
        pid = site.keeper_pid()
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        few = sum(processes.descriptors(pid).values()) + world.random.randrange(3)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, before[1]))
        try:
            time.sleep(world.random.uniform(0.1, 0.8))
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


class Crowd(Fault):
    """Two hundred connections at once, most of them silent, some asking and not reading; then all gone."""

    weight = 5

    def strike(self, world: World, site: Site) -> None:
        with ExitStack() as held:
            for number in range(200):
                connection = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connection.setblocking(False)
                with suppress(BlockingIOError):  # a full backlog is part of it
                    connection.connect(str(site.place.socket_path))
                    if number % 4 == 0:
                        connection.send(frame(Status()) * 20)
            time.sleep(world.random.uniform(0.05, 0.5))


class StopSupervisor(Fault):
    """SIGTERM, to the supervisor or to the keeper itself: a clean stop, and everything gone; then a new one."""

    weight = 2
    permits = STOPPED | DISAGREE
    keeps_weights = False

    def strike(self, world: World, site: Site) -> None:
        if world.random.random() < 0.7:
            site.supervisor.send_signal(signal.SIGTERM)
        else:
            os.kill(site.keeper_pid(), signal.SIGTERM)
        require_clean_exit(site)
        site.start()
        site.wait_ready(0)
        site.group.align()


class KillSupervisor(Fault):
    """kill -9: the vault is gone, and the socket file is left with nobody behind it: loud, and no reason to fall back.
    The next keeper replaces the file.
    """

    weight = 2
    permits = frozenset({DaemonUnreachable.code}) | DISAGREE
    keeps_weights = False

    def strike(self, world: World, site: Site) -> None:
        site.kill_supervisor()
        site.start()
        site.wait_ready(0)
        site.group.align()


class ReleasePlace(Fault):
    """`weightcached release`, and a new start."""

    weight = 1
    at = "single"
    permits = STOPPED
    keeps_weights = False

    def strike(self, world: World, site: Site) -> None:
        site.command("release")
        require_clean_exit(site)
        site.start()
        site.wait_ready(0)


def require_clean_exit(site: Site) -> None:
    """It ends with 0, and the socket file is gone."""
    status = site.wait_exit(STOP_S)
    if status != 0:
        raise Broken("exit", f"supervisor of {site.name} was told to stop and ended with {status}")
    if site.place.socket_path.exists():
        raise Broken("path", f"{site.place.socket_path} is still there after a clean stop that kept nothing")


PROCESS_FAULTS: tuple[type[Fault], ...] = (
    KillKeeper,
    KillKeeperWhileAdopting,
    KillKeeperUntilQuarantine,
    KillKeeperInsideAttach,
    PauseKeeper,
    HangKeeper,
    PauseSupervisor,
    KillHoldingEngine,
    KillLoopingEngine,
    KillForkedEngine,
    PauseEngine,
    LimitDescriptors,
    Crowd,
    StopSupervisor,
    KillSupervisor,
    ReleasePlace,
)
