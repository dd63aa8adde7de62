"""What has to hold after every step, whatever struck. Owns the judgement; asks the world, changes nothing in it but to
bring engines to rest while it looks.

Each raises :class:`Broken` with the word for what is broken: `outcome` and `content` (the contract's table), `bytes`,
`complete`, `path`, `kept`, `freed`, `ranks`, `undecided`, `versions`, `state`, `control`, `vault`, `lease`,
`descriptors`, `processes`, `memory`, `lock`, `files`, `engine`; a fault that could not do what has to be possible
raises `change`, `exit`, `progress`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tests.faults.chaos import processes
from tests.faults.chaos.broken import Broken
from tests.faults.chaos.changing import KEEP, ChangingGroup
from tests.faults.chaos.engines import Engine
from tests.faults.chaos.faults import ABSENT, STOPPED
from tests.faults.chaos.group import Group
from tests.faults.chaos.records import Record
from tests.faults.chaos.site import Site
from tests.faults.chaos.world import World
from weightcached.client.control.coordinator import held as held_of
from weightcached.protocol.messages import Report
from weightcached.protocol.places import BINDING_SUFFIX, Place
from weightcached.protocol.transaction import same_on_all

KEEPER_MAX_MIB = 64
SUPERVISOR_MAX_MIB = 24
GROWTH_MAX_MIB = 6
"""What a keeper's own memory may grow by while it lives."""
SETTLED_WITHIN_S = 15.0
_PAUSE_S = 0.05
_MEMORY_SLACK_BYTES = 64 << 10
"""What manifests and states may differ by: a digest is known or not."""

_T = TypeVar("_T")


def take_levels(world: World) -> None:
    """How much a place holds when nothing is going on; called while no engine is there."""
    for site in world.sites:
        report = _settled(site)
        _require_control(site, report)
        site.generation = report.generation
        site.held = frozenset({str(report.generation)})
        site.generation_nbytes = processes.memfd_nbytes({report.pid}, of_weights=True)
        _eventually(partial(_require_alone, site.place))
        _, held = site.look()
        site.levels = {"keeper": _without_connections(held, site.report()), "supervisor": _supervisor_fds(site)}
    world.memory_nbytes = processes.memfd_nbytes(processes.marked(world.mark))


def check(world: World, struck: Site | None, permits: frozenset[str], *, keeps_weights: bool, all_rows: bool) -> None:
    """Everything, after a step that struck one site. Engines rest meanwhile, and are at work again afterwards."""
    world.hold_hostile(signal.SIGSTOP)
    _require_paths(world, struck, permits)
    held = {}
    for group in world.groups:
        allowed = permits if struck in group.sites else frozenset()
        for engine in group.engines:
            held[engine.pid] = _check_engine(world, group, engine, rows="all" if all_rows else "some")
            for record in engine.news():
                _judge(world, group, engine, record, allowed)
    for site in world.sites:
        others = struck is not None and site.group is struck.group and site.group.changes
        _check_site(world, site, kept=keeps_weights or not (site is struck or others))
    for group in world.groups:
        if isinstance(group, ChangingGroup):
            _eventually(partial(_require_one_version, group))
            world.figures.changes += group.sites[0].committed()
        _check_leases(world, group, held)
    _check_processes(world)
    _check_memory(world)
    world.hold_hostile(signal.SIGCONT)
    for group in world.groups:
        for engine in group.engines:
            engine.go()
    world.figures.checks["steps"] += 1


def check_end(world: World) -> None:
    """After everything was stopped: nothing is left."""
    _eventually(lambda: _nothing(processes.marked(world.mark), "processes are left"))
    for site in world.sites:
        left = os.listdir(site.place.directory)
        if set(left) != {one.place.lock_path.name for one in site.group.sites}:
            raise Broken("files", f"after a clean stop {site.place.directory} holds {left}")
        if holders := processes.lock_holders(site.place.lock_path):
            raise Broken("lock", f"{holders} processes still hold {site.place.lock_path}")
    if left := os.listdir(world.folders.notify):
        raise Broken("files", f"after a clean stop notify sockets are left: {left}")


def _require_paths(world: World, struck: Site | None, permits: frozenset[str]) -> None:
    for path in world.watch.absences():
        owner = next(site for site in world.sites if site.place.socket_path == path)
        if owner is not struck or ABSENT not in permits:
            raise Broken("path", f"{path} was absent for an instant while weights were cached")


# Engines


def _judge(world: World, group: Group, engine: Engine, record: Record, permits: frozenset[str]) -> None:
    event = record.get("event")
    if event == "attach":
        outcome = record["outcome"]
        world.figures.attaches[outcome] += 1
        world.figures.attach_seconds.append(record["seconds"])
        _require_right_bytes(world, group, engine, record)
        if outcome != "daemon" and outcome not in permits:
            raise Broken("outcome", f"an attach of {engine.role} {engine.pid} ended in {record}")
        listening_s = group.sites[record.get("rank", 0)].listening_s
        if outcome in STOPPED and record["at_s"] - record["seconds"] > listening_s:
            raise Broken("outcome", f"{engine.role} {engine.pid} began when a daemon listened, and ended in {record}")
    elif event in ("lost", "resumed", "stale"):
        world.figures.lease_events[event] += 1
        if event == "resumed":
            world.figures.detached_seconds.append(record["detached_s"])
    elif event == "swapped":
        world.figures.swaps += 1
        world.figures.barrier_seconds.append(record["barrier_s"])
        _require_right_bytes(world, group, engine, record)
    elif event == "not swapped":
        world.figures.not_swapped[record["code"]] += 1
    elif event == "torn":
        raise Broken("bytes", f"a step of {engine.role} {engine.pid} saw two variants: {record}")
    elif "text" in record:
        raise Broken("engine", f"an engine said {record['text']}")


def _require_right_bytes(world: World, group: Group, engine: Engine, said: Record) -> None:
    world.figures.rows_compared += said.get("compared", 0)
    world.figures.checks["rows"] += said.get("compared", 0)
    if said.get("missing"):
        raise Broken("complete", f"{engine.role} {engine.pid} was granted a set without {said['missing']}")
    if said.get("wrong"):
        raise Broken("bytes", f"{engine.role} {engine.pid} reads other bytes than the checkpoint's: {said}")
    if isinstance(group, ChangingGroup) and said.get("label") is not None:
        for version in said["versions"]:
            group.learn(version, said["label"])
    world.figures.steps += said.get("steps", 0)


def _check_engine(world: World, group: Group, engine: Engine, *, rows: str) -> Record:
    """What it says of itself. However often it attached or lost its lease: with one lease it holds what it
    held at first (as two looks agree). On a busy machine it may lose its lease right after it spoke: it is asked again.
    """
    expected, deadline_s = engine.level or Counter(), time.monotonic() + SETTLED_WITHIN_S
    while True:
        said = engine.check(rows=rows)
        _require_right_bytes(world, group, engine, said)
        now = processes.descriptors(engine.pid) + processes.threads(engine.pid)
        if said["state"] != "connected":
            break
        if now == expected:
            engine.level = now
            break
        if time.monotonic() > deadline_s:
            more, fewer = now - expected, expected - now
            raise Broken("descriptors", f"{engine.role} {engine.pid}: more {more}, fewer {fewer}")
        if engine.level is None:
            expected = now
    world.figures.engine_mib_max = max(world.figures.engine_mib_max, processes.anonymous_mib(engine.pid))
    return said


def _check_leases(world: World, group: Group, held: dict[int, Record]) -> None:
    """Who uses what is held has its lease; who uses what is not held any more attaches again."""
    for engine in group.engines:
        said = held[engine.pid]
        if engine.role == "loop" and said["generation"] is None:
            continue  # its last attach met an error, which was judged
        uses = said.get("generations", [said["generation"]])
        there = bool(uses) and all(one in site.held for one, site in zip(uses, group.sites, strict=True))
        if there and said["state"] != "connected":
            raise Broken("lease", f"{engine.role} {engine.pid} uses what is held, and is {said['state']}")
        if not there and said["state"] == "connected":
            raise Broken("lease", f"{engine.role} {engine.pid} has a lease of {uses}, which is not held")
        if not there and engine.role == "hold":
            again = engine.attach_again()
            if again["outcome"] != "daemon":
                raise Broken("outcome", f"{engine.role} {engine.pid} attached again, and met {again}")
    world.figures.checks["leases"] += 1


# Daemons


def _settled(site: Site) -> Report:
    """Once nothing is under way: a report of a keeper that serves, with its weights in the vault."""

    def look() -> Report:
        report = site.report()
        if report.state != "ready":
            raise Broken("state", f"{site.name} is {report.state}: {report.last_error}")
        if report.vault != "kept":
            raise Broken("vault", f"weights of {site.name} are {report.vault}: {report.vault_reason}")
        if helpers := processes.children(report.pid):
            raise Broken("processes", f"{site.name} has helpers: {list(map(processes.command, helpers))}")
        return report

    return _eventually(look)


def _check_site(world: World, site: Site, *, kept: bool) -> None:
    report = _settled(site)
    _require_control(site, report)
    if report.adoption_seconds is not None:
        world.figures.adoption_seconds[f"{site.name} {report.pid} {site.supervisor.pid}"] = report.adoption_seconds
    if kept and report.generation != site.generation:
        raise Broken("kept", f"{site.name} served {site.generation}, and now {report.generation}: {report.last_error}")
    site.generation = report.generation
    _eventually(lambda: _require_freed(site))
    if report.generation is not None:
        world.figures.generations.add(report.generation)
    _eventually(lambda: _require_levels(site))
    if not site.place.socket_path.is_socket():
        raise Broken("path", f"{site.place.socket_path} is not there")
    _eventually(lambda: _require_one_lock(site))
    _eventually(lambda: _require_files(site))
    _require_steady(site, report.pid)
    world.figures.keeper_mib_max = max(world.figures.keeper_mib_max, processes.anonymous_mib(report.pid))
    supervisor_mib = processes.anonymous_mib(site.supervisor.pid)
    world.figures.supervisor_mib_max = max(world.figures.supervisor_mib_max, supervisor_mib)
    if world.figures.keeper_mib_max > KEEPER_MAX_MIB or supervisor_mib > SUPERVISOR_MAX_MIB:
        raise Broken("memory", f"keeper {world.figures.keeper_mib_max} MiB, supervisor {supervisor_mib} MiB")
    world.figures.checks["places"] += 1


def _require_control(site: Site, report: Report) -> None:
    """The control plane is there, and says the same."""
    if (current := site.state().current) != report.generation:
        raise Broken("control", f"{site.name} serves {report.generation}, and says {current} to a coordinator")


def _require_alone(place: Place) -> None:
    """Nobody is connected to the control plane any more: ZeroMQ ends connections some time after it was told to."""
    if connected := processes.connected_at(place.control_path.with_name(place.control_path.name + BINDING_SUFFIX)):
        raise Broken("descriptors", f"{connected} are connected to the control plane of {place}")


def _require_freed(site: Site) -> None:
    """Nothing is held but what is served, used, pinned, or kept for rollback; and no pin is left."""
    state = site.state()
    spare = [one for one in state.generations if one.standing == "previous" and not one.leases]
    kept = KEEP if site.group.changes else 0
    if len(spare) > kept or any(one.pinned or one.pinned_for_s is not None for one in spare):
        raise Broken("freed", f"{site.label} holds what nobody needs: {spare}")
    site.held = frozenset(one.generation for one in state.generations)


def _require_steady(site: Site, pid: int) -> None:
    """The keeper's own memory does not grow from step to step."""
    own_mib = processes.anonymous_mib(pid)
    if site.own_mib[0] != pid:
        site.own_mib = pid, own_mib
    if own_mib > site.own_mib[1] + GROWTH_MAX_MIB:
        raise Broken("memory", f"the keeper of {site.label} had {site.own_mib[1]} MiB of its own, and has {own_mib}")


def _require_one_version(group: ChangingGroup) -> None:
    """All ranks serve one version, and nothing is open or waits for a decision."""
    states = group.states()
    for site, state in zip(group.sites, states, strict=True):
        if state.open is not None or (state.change is not None and state.change.state in ("preparing", "prepared")):
            raise Broken("undecided", f"{site.label}: open {state.open}, {state.change}")
    served = [held_of(one) for state in states if (one := state.generation(state.current)) is not None]
    if len(served) < len(states) or not same_on_all(served):
        raise Broken("ranks", f"ranks of {group.name} serve {served}")


def _require_levels(site: Site) -> None:
    """Of weights what is held, and of others not more than at the beginning: uvloop opens some with the first child."""
    site.held = frozenset(one.generation for one in site.state().generations)
    report, held = site.look()
    for who, now in (("keeper", _without_connections(held, report)), ("supervisor", _supervisor_fds(site))):
        before = Counter(site.levels[who])
        before[processes.WEIGHTS] *= len(site.held)
        if now - before or now[processes.WEIGHTS] != before[processes.WEIGHTS]:
            raise Broken("descriptors", f"{who} of {site.label}: more {now - before}, fewer {before - now}")


def _require_files(site: Site) -> None:
    """Those of all ranks, and nothing else."""
    expected: list[str] = []
    for place in (one.place for one in site.group.sites):
        expected += (one.name for one in (place.lock_path, place.socket_path, place.control_path, place.events_path))
    if (found := sorted(os.listdir(site.place.directory))) != sorted(expected):
        raise Broken("files", f"{site.place.directory} holds {found}, expected {expected}")


def _without_connections(held: Counter[str], report: Report) -> Counter[str]:
    return held - Counter({"socket": report.connections})


def _supervisor_fds(site: Site) -> Counter[str]:
    return processes.descriptors(site.supervisor.pid)


def _require_one_lock(site: Site) -> None:
    if (holders := processes.lock_holders(site.place.lock_path)) != 1:
        raise Broken("lock", f"{holders} processes hold {site.place.lock_path}")


# The whole run


def _check_processes(world: World) -> None:
    def look() -> None:
        expected = {site.supervisor.pid for site in world.sites} | {site.keeper_pid() for site in world.sites}
        expected |= {engine.pid for group in world.groups for engine in group.engines} | world.forked
        expected |= {world.hostile_pid} if world.hostile_pid is not None else set()
        _nothing(processes.marked(world.mark) - expected, "processes that nobody should have")

    _eventually(look)
    world.figures.checks["processes"] += 1


def _check_memory(world: World) -> None:
    """No memory of weights is held but of the generations that daemons say they hold."""

    def look() -> None:
        held = [_held_now(site) for site in world.sites]
        pids = processes.marked(world.mark)
        for pid in pids:
            if more := processes.generations_held(pid) - frozenset().union(*held):
                raise Broken("memory", f"{processes.command(pid)} ({pid}) holds {more}, daemons hold {held}")
        nbytes = processes.memfd_nbytes(pids)
        more_nbytes = sum((len(ids) - 1) * site.generation_nbytes for ids, site in zip(held, world.sites, strict=True))
        if abs(nbytes - world.memory_nbytes - more_nbytes) > _MEMORY_SLACK_BYTES:
            expected = f"{world.memory_nbytes} at the beginning, and {more_nbytes} for other generations"
            raise Broken("memory", f"{nbytes} bytes of memory are held; expected {expected}")

    _eventually(look)
    world.figures.checks["memory"] += 1


def _held_now(site: Site) -> frozenset[str]:
    site.held = frozenset(one.generation for one in site.state().generations)
    return site.held


def _nothing(pids: set[int], what: str) -> None:
    if pids:
        raise Broken("processes", f"{what}: {[f'{pid} {processes.command(pid)}' for pid in sorted(pids)]}")


def _eventually(look: Callable[[], _T]) -> _T:
    """What ``look`` returns once it raises nothing, which has to be soon: what is under way needs a moment to end."""
    deadline_s = time.monotonic() + SETTLED_WITHIN_S
    while True:
        try:
            return look()
        except Broken:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_PAUSE_S)
