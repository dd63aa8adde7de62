"""Changes of a group's weights, and faults that strike in the middle of one: everybody takes part, nobody may notice.

Who is killed is killed when some rank says how far it is, so that every step of a change has its turn. What is left
open then is ended as an operator would (`update --resolve`); that nothing else needs that is judged after each step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import ClassVar

from tests.faults.chaos.broken import Broken
from tests.faults.chaos.changing import KINDS, ChangingGroup, changing
from tests.faults.chaos.faults import Fault
from tests.faults.chaos.site import READY_S, Site
from tests.faults.chaos.variants import HEADS, PUSHED
from tests.faults.chaos.world import World
from weightcached.client.control import commands, drop, pin, rollback
from weightcached.protocol.errors import WeightCacheError

AT_ONCE = "at once"
_STEPS = (AT_ONCE, "preparing", "prepared", "committed")
_AT_ONCE_MAX_S = 0.8
_JITTER_MAX_S = 0.3
_TIMES = 10
_ENDED = frozenset(range(5))
"""Exit statuses of a coordinator that was not killed itself."""


class Change(Fault):
    """Strikes a group, and may have another generation served afterwards."""

    keeps_weights = False
    at = "changing"


class Update(Change):
    """To another checkpoint, or back to the one before by loading it anew."""

    weight = 14

    def strike(self, world: World, site: Site) -> None:
        group = changing(site)
        group.update(group.other())


class RollBack(Change):
    """To the version before, and from there back, some times: nothing is loaded."""

    weight = 10

    def strike(self, world: World, site: Site) -> None:
        group = changing(site)
        if not group.can_roll_back():
            group.update(group.other())
        for _ in range(world.random.randint(1, _TIMES)):
            _roll_back(group)


def _roll_back(group: ChangingGroup) -> None:
    before = group.current()
    try:
        changed = rollback(**group.where)
    except WeightCacheError as error:
        raise Broken("change", f"a rollback of {group.name} was refused: {error!r}") from error
    if changed.away or changed.version == before:
        raise Broken("change", f"a rollback of {group.name} from {before} has brought {changed}")


class Push(Change):
    """From a trainer: everything."""

    weight = 8

    def strike(self, world: World, site: Site) -> None:
        changing(site).push(world.random.choice(PUSHED), partial=False)


class PushHead(Change):
    """From a trainer: one tensor, onto what is served."""

    weight = 8

    def strike(self, world: World, site: Site) -> None:
        changing(site).push(world.random.choice(HEADS), partial=True)


class PinAndDrop(Change):
    """What is pinned outlasts two changes that would have it freed, and goes when it is unpinned; what is kept for
    rollback and used by nobody is dropped.
    """

    weight = 4

    def strike(self, world: World, site: Site) -> None:
        group = changing(site)
        pinned = group.current()
        try:
            pin(pinned, **group.where)
            for _ in range(2):
                group.push(world.random.choice(PUSHED), partial=False)
            if group.holders(pinned) < len(group.sites):
                raise Broken("kept", f"{pinned} was pinned at {group.name}, and is not held any more")
            pin(pinned, pinned=False, **group.where)
            if (spare := group.spare()) is not None:
                drop(spare, **group.where)
                if group.holders(spare):
                    raise Broken("freed", f"{spare} was dropped at {group.name}, and is still held")
        except WeightCacheError as error:
            raise Broken("change", f"{group.name}: {error!r}") from error


class TwoCoordinators(Change):
    """At once. One change at a time: each of them does all of it, or says that it did nothing."""

    weight = 6

    def strike(self, world: World, site: Site) -> None:
        group = changing(site)
        before = group.current()
        with ExitStack() as stack:
            both = [stack.enter_context(group.change(kind, world.random)) for kind in world.random.choices(KINDS, k=2)]
            ends = [_end_of(one) for one in both]
        statuses = [status for status, _ in ends]
        if not set(statuses) <= {commands.DONE_EXIT, commands.NOT_NOW_EXIT, commands.FAILED_EXIT}:
            raise Broken("change", f"of two coordinators at once one ended so: {ends}")
        if commands.DONE_EXIT not in statuses and group.current() != before:
            raise Broken("change", f"both said that nothing has changed, and {group.current()} is served: {ends}")


class SlowRank(Change):
    """Its worker is stopped until the other ranks wait for the decision, and have looked for it: they serve what they
    served. Then it dies and nothing has changed anywhere, or it goes on and all change.
    """

    weight = 6

    def strike(self, world: World, site: Site) -> None:
        group = changing(site)
        marks = {one.rank: one.records.mark() for one in group.sites if one is not site}
        before = [state.current for state in group.states()]
        number = world.random.choice((signal.SIGKILL, signal.SIGCONT))
        with group.change("update", world.random) as process:
            worker = site.worker_pid()
            os.kill(worker, signal.SIGSTOP)
            for rank, mark in marks.items():
                group.wait_change(rank, "prepared", mark)
                group.sites[rank].read_decision()
            now = [state.current for state in group.states()]
            os.kill(worker, number)
            status, said = _end_of(process)
        if now != before:
            raise Broken("ranks", f"{site.label} was not prepared, and ranks serve {now} instead of {before}")
        if number == signal.SIGKILL and (status == commands.DONE_EXIT):
            raise Broken("change", f"a worker died, and the update ended with {status}: {said}")
        if number == signal.SIGCONT and status != commands.DONE_EXIT:
            raise Broken("change", f"a worker was slow, and the update ended with {status}: {said}")


class KilledInChange(Change):
    """A change of any kind, and at some step of it somebody is killed."""

    kinds: ClassVar[Sequence[str]] = KINDS
    steps: ClassVar[Sequence[str]] = _STEPS
    """Of which changes, and at which steps of them, there is somebody to kill."""

    def strike(self, world: World, site: Site) -> None:
        group = changing(site)
        marks = [one.records.mark() for one in group.sites]
        kind, step = world.random.choice(self.kinds), world.random.choice(self.steps)
        if kind == "rollback" and not group.can_roll_back():
            kind = "update"
        with group.change(kind, world.random) as process:
            if step == AT_ONCE:
                time.sleep(world.random.uniform(0, _AT_ONCE_MAX_S))
            else:
                rank = world.random.randrange(len(group.sites))
                group.wait_change(rank, step, marks[rank])
                time.sleep(world.random.choice((0.0, world.random.uniform(0, _JITTER_MAX_S))))
            if self.kill(world, site, process):
                world.figures.in_the_middle[self.name()] += 1
            self.ended(_end_of(process))
        group.resolve()

    @abstractmethod
    def kill(self, world: World, site: Site, process: subprocess.Popen[str]) -> bool:
        """Do it, and wait until whoever it was can be waited for. Whether that was in the middle of the change that
        ``process`` makes.
        """

    def ended(self, end: tuple[int, str]) -> None:
        """Whoever made the change has ended, with this status, saying this."""
        status, _ = end
        if status not in _ENDED:
            raise Broken("change", f"whoever changed the weights ended so: {end}")


class KillCoordinator(KilledInChange):
    """Or the trainer, who is its own coordinator."""

    weight = 12

    def kill(self, world: World, site: Site, process: subprocess.Popen[str]) -> bool:
        under_way = process.poll() is None
        process.kill()
        return under_way

    def ended(self, end: tuple[int, str]) -> None:
        """However it ended: it was killed, or quicker."""


class KillKeeperInChange(KilledInChange):
    weight = 12

    def kill(self, world: World, site: Site, process: subprocess.Popen[str]) -> bool:
        victim, mark = site.keeper_pid(), site.records.mark()
        under_way = process.poll() is None
        os.kill(victim, signal.SIGKILL)
        site.wait_ready(mark)
        return under_way


class KillWorkerInChange(KilledInChange):
    """As soon as there is one; the change may be over with it."""

    weight = 8
    kinds = tuple(kind for kind in KINDS if kind != "rollback")
    steps = (AT_ONCE, "preparing")

    def kill(self, world: World, site: Site, process: subprocess.Popen[str]) -> bool:
        worker = site.worker_unless(lambda: process.poll() is not None)
        if worker is None:
            return False
        try:
            os.kill(worker, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


class KillEngineInChange(KilledInChange):
    """One that holds and changes over."""

    weight = 6

    def kill(self, world: World, site: Site, process: subprocess.Popen[str]) -> bool:
        under_way = process.poll() is None
        site.group.replace(site.group.one("hold"), world.random)
        return under_way


def _end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said, errors = process.communicate(timeout=2 * READY_S)
    except subprocess.TimeoutExpired:
        raise Broken("progress", f"a coordinator ({process.pid}) did not end within {2 * READY_S:g} s") from None
    return process.returncode, f"{said} {errors}"


CHANGES: tuple[type[Fault], ...] = (
    Update,
    RollBack,
    Push,
    PushHead,
    PinAndDrop,
    TwoCoordinators,
    SlowRank,
    KillCoordinator,
    KillKeeperInChange,
    KillWorkerInChange,
    KillEngineInChange,
)
