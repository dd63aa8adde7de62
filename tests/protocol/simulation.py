"""Every interleaving of a change over a few ranks: coordinators, ranks, engines, lost answers, late commands, deaths.

The decisions are those that run: ``client/control/course.py`` for coordinators, ``protocol/transaction.py`` for ranks
and their records, ``client/agreement.py`` for engines. Modelled is only what carries them: a rank executes one command
at a time; a command is answered, or is executed and its answer lost, or is late and executed at any later moment, once;
a rank may lose what it was loading, rank 0 (or another) its vault; a coordinator or an engine that stops for ever is
one that is never scheduled again. A rank that cannot reach rank 0 is one that does not read the record, for as long as
the search likes.

Worlds (ranks, record, ghosts) and coordinators are interned, and what one does to the other is remembered, so that a
state is a few small numbers. Ghosts are what no process knows: what was ever decided, and where it was acted upon; the
invariants are stated in them, so that a wrong rule cannot excuse itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weightcached.client import agreement
from weightcached.client.agreement import Standing
from weightcached.client.control import course as course_module
from weightcached.client.control.course import Answer, Ask, Change, Course, Phase, Refusal, Seen, Silence, Verb
from weightcached.protocol import transaction as rules_module
from weightcached.protocol.errors import UpdateConflict
from weightcached.protocol.transaction import Action, Decision, Held, Ledger, Outcome, Prepared, Versions

CURRENT = "current"
"""What an engine may ask a rank for instead of a version: whatever it serves."""
VAULT = 100
"""What losing a vault costs, apart from deaths."""
_LOOKS = (Verb.DESCRIBE, Verb.AWAIT, Verb.READ)


class Violation(AssertionError):
    """An invariant does not hold: with the events that lead there."""


@dataclass(frozen=True)
class Rules:
    """What is proved. A mutant replaces one of them."""

    opened: Callable[[Ledger, str], Ledger] = Ledger.opened
    commit: Callable[[Ledger, str, Prepared | None], Ledger] = Ledger.commit
    abort: Callable[[Ledger, str], Ledger] = Ledger.abort
    give_up: Callable[[Ledger, str], Ledger] = Ledger.abort
    """What rank 0 writes once the trainer that pushes is gone."""
    require_may_prepare: Callable[..., None] = rules_module.require_may_prepare
    action: Callable[[Prepared, Decision], Action] = rules_module.action
    after: Callable[[Course, dict[int, Answer]], Course] = course_module.after
    death: Callable[[Rank], Rank] = lambda rank: (
        dataclasses.replace(rank, change=None) if rank.change and rank.change.state != "prepared" else rank
    )
    """What is left of a rank's state when its keeper is killed and started again."""
    grants_prepared: Callable[[Action], bool] = lambda action: action is Action.SWITCH
    """Whether a rank gives an engine what it has prepared, by what it would do with that now."""
    wants: Callable[[str], str] = lambda version: version
    """What a new engine asks every rank for, when rank 0 serves ``version``."""
    agree: Callable[[Sequence[Standing]], bool] = agreement.agree
    """Whether an engine uses what its ranks were given."""


@dataclass(frozen=True)
class Plan:
    """What a coordinator's change loads: its version, or a rollback to it. ``served``: a rank that serves this version
    may also find that nothing has to be loaded. ``pushed``: rank 0 gives it up by itself, once it has heard of it."""

    version: str
    rollback: bool = False
    served: bool = False
    pushed: bool = False


@dataclass(frozen=True)
class Scenario:
    """How large the world is, and how much may go wrong in it."""

    size: int
    plans: dict[str, Plan]
    """By transaction: one coordinator each."""
    ends: int = 1
    """Coordinators that run `update --resolve`."""
    giving_up: int = 0
    """Coordinators that run `rollback --resolve`, as far as they give up what others have left."""
    late: int = 1
    """Commands that are executed after whoever sent them gave up on an answer."""
    deaths: int = 1
    lost: tuple[int, ...] = ()
    """Ranks of which one may lose its vault, and load the first version anew."""
    engines: int = 0
    """That start, and go over to other weights once they run."""
    mixed: bool = False


@dataclass(frozen=True)
class Rank:
    current: Held
    previous: tuple[Held, ...] = ()
    change: Change | None = None

    @property
    def prepared(self) -> Prepared | None:
        if self.change is None or self.change.state != "prepared" or self.change.held is None:
            return None
        return Prepared(self.change.transaction, self.change.held)


@dataclass(frozen=True)
class Engine:
    """One of all ranks. Its steps are those of ``client/vllm``: what every rank has given is compared, and used on all
    of them or on none.
    """

    size: int
    computes: tuple[str, ...] = ()
    """With which version, on each rank. Nothing before it has started."""
    wants: str = ""
    """What a new one asks for; a running one asks for what each rank grants now."""
    given: tuple[tuple[int, str], ...] = ()
    """What ranks have given it for that, and it does not use yet."""


@dataclass(frozen=True)
class World:
    ranks: tuple[Rank, ...]
    ledger: Ledger
    committed: frozenset[str] = frozenset()
    """Ghost: ever decided so, by any record."""
    aborted: frozenset[str] = frozenset()
    applied: frozenset[tuple[str, int]] = frozenset()
    """Ghost: which rank has switched for which change."""
    vaults_lost: int = 0


def held(version: str, note: str = "") -> Held:
    return Held(f"g{version}{note}", Versions(f"v{version}", f"v{version}"))


class Simulation:
    """A breadth-first search from the first state. ``states`` counts what was reached."""

    def __init__(self, scenario: Scenario, rules: Rules | None = None) -> None:
        self.scenario = scenario
        self.rules = rules or Rules()
        self._objects: list[Any] = []
        self._ids: dict[Any, int] = {}
        self._executed: dict[tuple[int, int], tuple[int, int]] = {}
        self._alone: dict[int, list[tuple[str, int, int]]] = {}
        self._engine_moves: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        self._moves: dict[int, list[tuple[int, int, bool]]] = {}
        self._answered: dict[tuple[int, int, int], list[int]] = {}
        self._silence = self._id(Silence())
        self.states = 0
        self.worlds = 0

    # Interning

    def _id(self, value: Any) -> int:
        found = self._ids.get(value)
        if found is None:
            found = self._ids[value] = len(self._objects)
            self._objects.append(value)
        return found

    # Ranks

    def _resolve(self, world: World, rank: int) -> World:
        """The rank reads the record, and acts upon it."""
        one = world.ranks[rank]
        change = one.change
        if change is None or not change.waits:
            return world
        decision = world.ledger.decision(change.transaction)
        prepared = one.prepared or Prepared(change.transaction, self._target(change.transaction))
        action = self.rules.action(prepared, decision)
        if action is Action.SWITCH and one.prepared is None:
            again = (change.transaction, rank) in world.applied  # a late command: the base is what it was before
            if decision.outcome is not Outcome.COMMITTED:
                return world
            if not again:
                raise Violation(f"{change.transaction} is committed while rank {rank} only prepares it")
            action = Action.DROP
        if action is Action.WAIT:
            return world
        return self._acted(world, rank, action)

    def _acted(self, world: World, rank: int, action: Action) -> World:
        """Switch or drop; the ghosts judge it, not the record."""
        one = world.ranks[rank]
        assert one.change is not None
        transaction, again = one.change.transaction, (one.change.transaction, rank) in world.applied
        if action is Action.DROP:
            if transaction not in world.aborted and not again:
                raise Violation(f"rank {rank} dropped {transaction}, which nobody aborted")
            if transaction in world.committed and not again and not world.vaults_lost:
                raise Violation(f"rank {rank} dropped {transaction}, which was committed")
            return _with_change(world, rank, Change(transaction, "aborted"))
        assert one.prepared is not None
        if transaction not in world.committed:
            raise Violation(f"rank {rank} switched for {transaction}, which nobody committed")
        new = one.prepared.held
        previous = tuple(sorted({*one.previous, one.current} - {new}, key=lambda held: held.generation))
        after = Rank(new, previous, Change(transaction, "committed"))
        world = dataclasses.replace(world, applied=world.applied | {(transaction, rank)})
        return _with_rank(world, rank, after)

    def _target(self, transaction: str) -> Held:
        plan = self.scenario.plans[transaction]
        return held(plan.version, "+" if plan.served else "")  # beside one of the same version

    def _prepare(self, world: World, rank: int, ask: Ask) -> World:
        one, transaction = world.ranks[rank], ask.transaction
        assert transaction is not None
        change = one.change
        if change is not None and change.transaction == transaction and change.waits:
            return world
        busy = one.prepared
        if change is not None and change.state == "preparing":
            busy = Prepared(change.transaction, self._target(change.transaction))
        self.rules.require_may_prepare(transaction, base=ask.base, current=one.current, prepared=busy)
        plan = self.scenario.plans[transaction]
        if not plan.rollback:
            return _with_change(world, rank, Change(transaction, "preparing"))
        wanted = Versions(f"v{plan.version}", f"v{plan.version}")
        found = next((had for had in (one.current, *one.previous) if had.versions.same(wanted)), None)
        if found is None:
            raise UpdateConflict("that version is not held here")
        return _with_change(world, rank, Change(transaction, "prepared", found))

    def _execute(self, world: World, ask: Ask) -> tuple[World, Answer]:
        """One command, atomically; the answer."""
        try:
            match ask.verb:
                case Verb.OPEN:
                    if world.ledger.open != ask.transaction and world.ranks[0].current.generation != ask.base:
                        raise UpdateConflict("another generation is served")
                    world = self._written(world, self.rules.opened(world.ledger, ask.transaction or ""))
                case Verb.PREPARE:
                    world = self._prepare(world, ask.rank, ask)
                case Verb.COMMIT | Verb.ABORT:
                    write = self.rules.commit if ask.verb is Verb.COMMIT else self.rules.abort
                    more = (world.ranks[0].prepared,) if ask.verb is Verb.COMMIT else ()
                    ledger = write(world.ledger, ask.transaction or "", *more)
                    return self._decide(world, ledger), ledger.decision(ask.transaction or "")
                case Verb.READ:
                    return world, world.ledger.decision(ask.transaction or "")
                case Verb.RESOLVE:
                    world = self._resolve(world, ask.rank)
        except UpdateConflict as conflict:
            return world, Refusal(conflict.code, conflict.message)
        one = world.ranks[ask.rank]
        return world, Seen(one.current, one.change, world.ledger.open if ask.rank == 0 else None)

    def _decide(self, world: World, ledger: Ledger) -> World:
        """Rank 0 writes that, and acts upon it."""
        return self._resolve(self._written(world, ledger), 0) if world.ledger != ledger else world

    def _written(self, world: World, ledger: Ledger) -> World:
        """The record replaced, and the ghosts that follow it."""
        committed = world.committed | {one.transaction for one in ledger.committed}
        aborted = world.aborted | set(ledger.aborted)
        both = committed & aborted
        if both and not world.vaults_lost:
            raise Violation(f"committed and aborted: {sorted(both)}")
        return dataclasses.replace(world, ledger=ledger, committed=committed, aborted=aborted)

    def _world_after(self, world_id: int, ask_id: int) -> tuple[int, int]:
        """The world after a command, and the answer: by their numbers."""
        known = self._executed.get((world_id, ask_id))
        if known is None:
            world, answer = self._execute(self._objects[world_id], self._objects[ask_id])
            known = self._executed[world_id, ask_id] = (self._id(world), self._id(answer))
        return known

    def _by_themselves(self, world_id: int) -> list[tuple[str, int, int]]:
        """(what, world after it, deaths that it takes, or VAULT) of what ranks do, or suffer, without a
        coordinator."""
        known = self._alone.get(world_id)
        if known is not None:
            return known
        world: World = self._objects[world_id]
        found: list[tuple[str, World, int]] = []
        for rank, one in enumerate(world.ranks):
            if one.change is not None and one.change.state == "preparing":
                target = self._target(one.change.transaction)
                done = Change(one.change.transaction, "prepared", target)
                failed = Change(one.change.transaction, "failed")
                plan = self.scenario.plans[one.change.transaction]
                if plan.served and one.current.versions.same(target.versions):
                    served = Change(one.change.transaction, "prepared", one.current)
                    found.append((f"rank {rank} serves it already", _with_change(world, rank, served), 0))
                found.append((f"rank {rank} has prepared", _with_change(world, rank, done), 0))
                found.append((f"rank {rank} fails to load", _with_change(world, rank, failed), 0))
            with contextlib.suppress(UpdateConflict):
                found.append((f"rank {rank} reads the record", self._resolve(world, rank), 0))
            found.append((f"rank {rank} is killed", _with_rank(world, rank, self.rules.death(one)), 1))
            if rank in self.scenario.lost:
                fresh = _with_rank(world, rank, Rank(held("1", "'")))
                ledger = Ledger() if rank == 0 else world.ledger
                found.append(
                    (
                        f"rank {rank} loses its vault",
                        dataclasses.replace(fresh, ledger=ledger, vaults_lost=world.vaults_lost + 1),
                        VAULT,
                    )
                )
        pushed = world.ranks[0].change
        if pushed is not None and self.scenario.plans[pushed.transaction].pushed:
            # At any later moment, too: it looks whether a decision is there, and then it writes.
            with contextlib.suppress(UpdateConflict):
                given_up = self.rules.give_up(world.ledger, pushed.transaction)
                found.append(("rank 0 gives up what is pushed", self._decide(world, given_up), 0))
        result = [(what, new, cost) for what, after, cost in found if (new := self._id(after)) != world_id]
        self._alone[world_id] = result
        return result

    # Engines

    def grant(self, world: World, rank: int, version: str) -> Held | None:
        """What ``rank`` gives an engine that wants exactly ``version``, or :data:`CURRENT`; it looks at the record
        where it has prepared that version."""
        one = world.ranks[rank]
        if version == CURRENT:
            return one.current
        wanted = Versions(version, version)
        prepared = one.prepared
        if prepared is not None and prepared.held.versions.same(wanted) and prepared.held not in one.previous:
            try:
                decision = world.ledger.decision(prepared.transaction)
                if self.rules.grants_prepared(self.rules.action(prepared, decision)):
                    return prepared.held
            except UpdateConflict:
                return None
        return next((had for had in (one.current, *one.previous) if had.versions.same(wanted)), None)

    def _decided(self, world: World) -> set[str]:
        return {"v1"} | {f"v{self.scenario.plans[one].version}" for one in world.committed}

    def check_world(self, world: World) -> None:
        """The invariants of one world."""
        decided = self._decided(world)
        for version in {"v1"} | {f"v{plan.version}" for plan in self.scenario.plans.values()}:
            for rank in range(len(world.ranks)):
                given = self.grant(world, rank, version)
                if given is not None and (given.versions.version != version or version not in decided):
                    raise Violation(f"rank {rank} grants {given}, which nobody decided, for {version}")
        if world.vaults_lost:
            return  # ranks may differ then; engines, which ask for one version, are refused
        leading = world.ranks[0].current.versions
        for rank, one in enumerate(world.ranks):
            if self.grant(world, rank, leading.version) is None:
                raise Violation(f"rank 0 serves {leading.version}, and rank {rank} cannot give it")
            prepared = one.prepared
            behind = prepared is not None and world.ledger.decision(prepared.transaction).outcome is Outcome.COMMITTED
            if not one.current.versions.same(leading) and not behind:
                raise Violation(f"rank {rank} serves {one.current}, rank 0 {leading.version}, and nothing leads there")

    # Coordinators: a coordinator is (course, answers so far)

    def _coordinator(self, course: Course, answers: dict[int, Answer] | None = None) -> int:
        """What decides nothing any more is left out: reasons are for people, and one that is done is done."""
        if course.phase is Phase.DONE:
            course = Course(course.size, begins=course.begins, phase=Phase.DONE)
        course = dataclasses.replace(course, failure=None, opened=False, asked=False, outcome=None, away=frozenset())
        return self._id((course, tuple(sorted((answers or {}).items()))))

    def _pending(self, coordinator_id: int) -> list[tuple[int, int, bool]]:
        """(rank, ask, whether it changes anything) of what this coordinator waits for."""
        known = self._moves.get(coordinator_id)
        if known is None:
            course, answers = self._objects[coordinator_id]
            had = dict(answers)
            asked = [ask for ask in course_module.asks(course) if ask.rank not in had]
            known = [(ask.rank, self._id(ask), ask.verb not in _LOOKS) for ask in asked]
            self._moves[coordinator_id] = known
        return known

    def _with_answer(self, coordinator_id: int, rank: int, answer_id: int) -> list[int]:
        """The coordinators that this one may be once it has that answer: it goes on, or gives up."""
        key = (coordinator_id, rank, answer_id)
        known = self._answered.get(key)
        if known is None:
            course, had = self._objects[coordinator_id]
            answers = {**dict(had), rank: _essence(course, self._objects[answer_id])}
            if len(answers) < len(course_module.asks(course)):
                known = [self._coordinator(course, answers)]
            else:
                after = self.rules.after(course, answers)
                known = [self._coordinator(after)]
                if after.phase is course.phase:
                    known.append(self._coordinator(course_module.given_up(after, "")))
            self._answered[key] = known
        return known

    # The search. A state: (world, late commands, lates left, deaths left, vaults left, engines, *coordinators)

    def first(self) -> tuple[Any, ...]:
        scenario = self.scenario
        world = World(tuple(Rank(held("1")) for _ in range(scenario.size)), Ledger())
        courses = [course_module.begin(scenario.size, one, mixed=scenario.mixed) for one in scenario.plans]
        courses += [course_module.end(scenario.size, forced=True)] * scenario.ends
        courses += [course_module.end(scenario.size, forced=True, commits=False)] * scenario.giving_up
        coordinators = [self._coordinator(one) for one in courses]
        engines = (self._id(Engine(scenario.size)),) * scenario.engines
        return (self._id(world), (), scenario.late, scenario.deaths, int(bool(scenario.lost)), engines, *coordinators)

    def successors(self, state: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """(what happens, the state after it)."""
        world, late, lates, deaths, vaults, engines, *coordinators = state
        for what, new, cost in self._by_themselves(world):
            if cost == VAULT and vaults:
                yield (what,), (new, late, lates, deaths, vaults - 1, engines, *coordinators)
            elif cost <= deaths:
                yield (what,), (new, late, lates, deaths - cost, vaults, engines, *coordinators)
        for position, ask in enumerate(late):
            new, _ = self._world_after(world, ask)
            rest = late[:position] + late[position + 1 :]
            yield ("late", ask), (new, rest, lates, deaths, vaults, engines, *coordinators)
        for number, coordinator in enumerate(coordinators):
            others, more = coordinators[:number], coordinators[number + 1 :]
            for rank, ask, changes in self._pending(coordinator):
                new, answer = self._world_after(world, ask)
                for after in self._with_answer(coordinator, rank, answer):
                    yield (number, ask), (new, late, lates, deaths, vaults, engines, *others, after, *more)
                if not lates:
                    continue
                for after in self._with_answer(coordinator, rank, self._silence):
                    rest = (*others, after, *more)
                    yield (number, ask, "unanswered"), (new, late, lates - 1, deaths, vaults, engines, *rest)
                    if changes:
                        waits = tuple(sorted((*late, ask)))
                        yield (number, ask, "is late"), (world, waits, lates - 1, deaths, vaults, engines, *rest)
        for number, engine in enumerate(engines):
            for what, new, engine_after in self._engine(world, engine):
                rest = (*engines[:number], engine_after, *engines[number + 1 :])
                yield (what,), (new, late, lates, deaths, vaults, rest, *coordinators)

    def _engine(self, world_id: int, engine_id: int) -> list[tuple[str, int, int]]:
        """(what, world after it, engine after it): a new one reads what rank 0 serves and asks every rank for exactly
        that, in any order; a running one asks for what each grants now."""
        known = self._engine_moves.get((world_id, engine_id))
        if known is None:
            found = self._asking(self._objects[world_id], self._objects[engine_id])
            known = [(what, self._id(world), self._id(engine)) for what, world, engine in found]
            self._engine_moves[world_id, engine_id] = known
        return known

    def _asking(self, world: World, engine: Engine) -> Iterator[tuple[str, World, Engine]]:
        if not engine.computes and not engine.wants:
            wants = self.rules.wants(world.ranks[0].current.versions.version)
            yield f"a new engine wants {wants}", world, dataclasses.replace(engine, wants=wants)
            return
        asks_for, who = (CURRENT, "a running engine") if engine.computes else (engine.wants, "a new engine")
        for rank in set(range(engine.size)) - {had for had, _ in engine.given}:
            given = self.grant(world, rank, asks_for)
            if given is None:
                yield f"{who} is refused by rank {rank}", world, dataclasses.replace(engine, wants="", given=())
                continue
            version, prepared = given.versions.version, world.ranks[rank].prepared
            if asks_for not in (CURRENT, version):
                raise Violation(f"{who} that wants {asks_for} was given {given} by rank {rank}")
            asked = world
            if prepared is not None and prepared.held == given and asks_for != CURRENT:
                asked = self._resolve(world, rank)
            has = dataclasses.replace(engine, given=tuple(sorted((*engine.given, (rank, version)))))
            yield f"{who} has {version} of rank {rank}", asked, self._compared(asked, has, who)

    def _compared(self, world: World, engine: Engine, who: str) -> Engine:
        """It uses what it was given, if that is all and one; and else goes on with what it had."""
        if len(engine.given) < engine.size:
            return engine
        versions = tuple(version for _, version in engine.given)
        standings = [
            Standing(rank=str(rank), place="", source="daemon", version=version, receipts_version=version)
            for rank, version in engine.given
        ]
        if not self.rules.agree(standings):
            return Engine(engine.size, engine.computes)
        if len(set(versions)) > 1:
            raise Violation(f"{who} computes with {' and '.join(versions)}")
        if not set(versions) <= self._decided(world):
            raise Violation(f"{who} computes with {versions[0]}, which nobody decided")
        return Engine(engine.size, versions)

    def run(self, *, max_states: int = 3_000_000) -> Simulation:
        """Visit every state; Violation with the way there."""
        first = self.first()
        came: dict[tuple[Any, ...], tuple[tuple[Any, ...] | None, tuple[Any, ...]]] = {first: (None, ())}
        waiting = deque([first])
        checked: set[int] = set()
        while waiting:
            state = waiting.popleft()
            try:
                if state[0] not in checked:
                    checked.add(state[0])
                    self.check_world(self._objects[state[0]])
                    self.check_progress(self._objects[state[0]])
                for what, after in self.successors(state):
                    if after not in came:
                        came[after] = (state, what)
                        waiting.append(after)
            except Violation as violation:
                raise Violation(f"{violation}\n" + "\n".join(self._way(came, state))) from None
            assert len(came) <= max_states, "the scenario is too large"
        self.states, self.worlds = len(came), len(checked)
        return self

    def _way(self, came: dict[Any, Any], state: Any) -> list[str]:
        events: list[str] = []
        while state is not None:
            state, what = came[state]
            words = [self._objects[word] if position == 1 else word for position, word in enumerate(what)]
            events.append("  " + " ".join(map(str, words)))
        return events[::-1][1:]

    def check_progress(self, world: World) -> None:
        """One coordinator, and ranks that answer it, leave nothing open and nothing prepared."""
        course = course_module.end(self.scenario.size, forced=True)
        for _ in range(200):
            asked = course_module.asks(course)
            if not asked:
                break
            answers: dict[int, Answer] = {}
            for ask in asked:
                world, answers[ask.rank] = self._execute(world, ask)
            course = self.rules.after(course, answers)
        left = [rank for rank, one in enumerate(world.ranks) if one.change is not None and one.change.waits]
        if course_module.asks(course) or left or world.ledger.open is not None:
            raise Violation(f"`update --resolve` does not end it: {course}, open {world.ledger.open}, waiting {left}")


def _essence(course: Course, answer: Answer) -> Answer:
    """An answer without what the course does not look at: what is served, but before a change begins; what of other
    changes is over.
    """
    if not isinstance(answer, Seen):
        return answer
    change = answer.change
    looks = course.begins and course.phase is Phase.LOOK
    another = course.phase is Phase.APPLY or (change is not None and change.transaction != course.transaction)
    if change is not None and not change.waits and another:
        change = None
    return Seen(answer.current if looks else None, change, answer.open if course.phase is Phase.LOOK else None)


def _with_change(world: World, rank: int, change: Change) -> World:
    return _with_rank(world, rank, dataclasses.replace(world.ranks[rank], change=change))


def _with_rank(world: World, rank: int, one: Rank) -> World:
    return dataclasses.replace(world, ranks=(*world.ranks[:rank], one, *world.ranks[rank + 1 :]))
