"""A run: one fault after the other, chosen under a seed, everything checked after each, until time or faults are over.

Owns the order and what is said when something is broken: seed, step, history, and what everybody wrote last.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.faults.chaos import invariants
from tests.faults.chaos.broken import Broken
from tests.faults.chaos.faults import PROCESS_FAULTS, Fault, require_clean_exit
from tests.faults.chaos.faults_changes import CHANGES
from tests.faults.chaos.faults_files import FILE_FAULTS
from tests.faults.chaos.faults_loading import LOADING_FAULTS
from tests.faults.chaos.figures import Figures
from tests.faults.chaos.world import GROUPS, World
from weightcached.client.stopping import Stopped

ALL_FAULTS: tuple[type[Fault], ...] = (*PROCESS_FAULTS, *LOADING_FAULTS, *FILE_FAULTS, *CHANGES)
_ALL_ROWS_EVERY = 10
_LOG_RECORDS = 60
_EVERYDAY = ("granted", "lease ended", "refused")


@dataclass
class Outcome:
    """``broken`` is None for a run that survived."""

    seed: int
    seconds: float
    figures: Figures
    history: list[str] = field(default_factory=list)
    broken: Broken | None = None
    stopped: Stopped | None = None
    """What ended it before its time (``raising_stopped``)."""
    logs: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run. Of ``seconds`` and ``faults_max`` the first that is reached ends it."""

    seed: int
    seconds: float
    faults_max: int | None = None
    only: Sequence[str] = ()
    """Names of faults; all when empty."""
    in_turn: bool = False
    """One after the other, instead of at random."""
    keeper: Sequence[str] = ("serve",)
    """The supervised command up to its options."""
    hostile: bool = True

    groups: Sequence[str] = GROUPS
    """Which of the world's are there."""

    def steps(
        self, single: Sequence[str], changing: Sequence[str], *, small_disk: bool
    ) -> Iterator[tuple[type[Fault], str]]:
        """What strikes, and at which place of those by themselves or of groups that are changed, without end: the seed
        decides, whatever happens.
        """
        places = {"single": list(single), "changing": list(changing), "any": [*single, *changing]}
        known = {kind.name(): kind for kind in ALL_FAULTS}
        chosen = [known[name] for name in self.only] if self.only else list(ALL_FAULTS)
        kinds = [kind for kind in chosen if places[kind.at] and (small_disk or not kind.needs_small_disk)]
        weights = [kind.weight for kind in kinds]
        chance, turns = random.Random(self.seed), itertools.cycle(kinds)
        while True:
            kind = next(turns) if self.in_turn else chance.choices(kinds, weights)[0]
            yield kind, chance.choice(places[kind.at])


def run(plan: Plan, *, say: bool = False) -> Outcome:
    """Run it to the end, or to the first invariant that does not hold."""
    began_s = time.monotonic()
    world = World(random.Random(plan.seed), keeper=plan.keeper, hostile=plan.hostile, groups=plan.groups)
    outcome = Outcome(plan.seed, 0.0, world.figures)
    with world:
        try:
            _run(plan, world, outcome.history, began_s + plan.seconds, say=say)
        except Broken as broken:
            outcome.broken = broken
            outcome.logs = _logs(world)
        except Stopped as stopped:
            outcome.stopped = stopped
    outcome.seconds = time.monotonic() - began_s
    return outcome


def _run(plan: Plan, world: World, history: list[str], until_s: float, *, say: bool) -> None:
    world.start()
    sites = {site.label: site for site in world.sites}
    single = [site.label for site in world.sites if not site.group.changes]
    changing = [site.label for site in world.sites if site.group.changes]
    invariants.take_levels(world)
    world.populate()
    invariants.check(world, None, frozenset(), keeps_weights=True, all_rows=True)
    for kind, place in plan.steps(single, changing, small_disk=world.digests_tmpfs is not None):
        if time.monotonic() >= until_s or len(history) == plan.faults_max:
            break
        site = sites[place]
        history.append(f"{kind.name()} at {site.label}")
        struck_s = time.monotonic()
        kind().strike(world, site)
        recovered_s = time.monotonic()
        invariants.check(
            world,
            site,
            kind.permits,
            keeps_weights=kind.keeps_weights,
            all_rows=len(history) % _ALL_ROWS_EVERY == 0,
        )
        world.figures.faults[kind.name()] += 1
        world.figures.fault_seconds[kind.name()] += recovered_s - struck_s
        if say:
            checked_s = time.monotonic() - recovered_s
            print(
                f"{len(history):5} {history[-1]:36} {recovered_s - struck_s:6.2f} s, checked in {checked_s:5.2f} s",
                flush=True,
            )
    _end(world)


def _end(world: World) -> None:
    """Stop everything as an operator would, and look whether anything is left."""
    world.depopulate()
    for site in world.sites:
        site.supervisor.terminate()
        require_clean_exit(site)
    invariants.check_end(world)


def _logs(world: World) -> str:
    """What everybody wrote last; of daemons, without what engines do all the time."""
    lines = []
    for site in world.sites:
        records = [one for one in site.records.since(0) if one.get("message") not in _EVERYDAY]
        lines += [f"--- daemon {site.label}", *map(str, records[-_LOG_RECORDS:])]
    for group in world.groups:
        for engine in group.engines:
            lines.append(f"--- engine {engine.role} {engine.pid} at {group.name}")
            lines += map(str, engine.records.since(0)[-_LOG_RECORDS // 4 :])
    for log in sorted(world.folders.logs.iterdir()):
        lines += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-_LOG_RECORDS:]]
    return "\n".join(lines)
