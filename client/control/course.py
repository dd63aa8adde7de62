"""The course of a change over all ranks, as a pure function: what has been answered → what is asked next.

Owns the coordinator's decisions and nothing else: no socket, no clock, no message. ``coordinator.py`` carries the asks
out; ``tests/protocol/simulation.py`` walks every interleaving of these same functions with ranks that follow
``protocol/transaction.py``. Ranks are positions, the leader is 0.

Two programs. :func:`begin` makes a change: look at all, open it at the leader, prepare it everywhere, wait, decide at
the leader, tell all. Where every rank has found that it serves that already, what is decided is to abort.
:func:`end` ends what somebody else left: as the leader's record says; what is open is committed if every rank has it
prepared in one version, and else aborted; or aborted in any case, by whoever makes a change himself. Nothing here is
remembered between the two: a coordinator that dies is finished by the next one from what the ranks hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from weightcached.protocol.transaction import Decision, Held, Outcome, same_on_all

LEADER = 0
_ABORTED = "another coordinator aborted this change; next step: see what is served now, and begin anew"
_STOPPING = "its daemon was told to end while it prepared the change, and has given it up; next step: start it again"


class Verb(StrEnum):
    DESCRIBE = "describe"
    OPEN = "open"
    PREPARE = "prepare"
    AWAIT = "await"
    COMMIT = "commit"
    ABORT = "abort"
    READ = "read"
    RESOLVE = "resolve"


@dataclass(frozen=True, slots=True)
class Ask:
    """One command to one rank. ``base`` of :attr:`Verb.OPEN` and :attr:`Verb.PREPARE`."""

    rank: int
    verb: Verb
    transaction: str | None = None
    base: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What a rank says of the change that it works at, holds, or ended last."""

    transaction: str
    state: str
    held: Held | None = None
    why: str = ""
    code: str = ""
    """Of the error that ended it, where the rank has one."""

    @property
    def waits(self) -> bool:
        return self.state in ("preparing", "prepared")


@dataclass(frozen=True, slots=True)
class Seen:
    """What of a rank's state matters here. ``open`` at the leader."""

    current: Held | None
    change: Change | None = None
    open: str | None = None
    stopping: bool = False
    """The daemon has been told to end."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The rank answered that it will not. ``code`` is of an error."""

    code: str
    why: str


@dataclass(frozen=True, slots=True)
class Silence:
    """No answer: the command may have been carried out, may yet be, or never."""

    why: str = ""
    code: str = "daemon_unreachable"


Answer = Seen | Decision | Refusal | Silence


class Phase(StrEnum):
    LOOK = "look"
    OPEN = "open"
    PREPARE = "prepare"
    WAIT = "wait"
    COMMIT = "commit"
    ABORT = "abort"
    READ = "read"
    APPLY = "apply"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a change does not come about. ``code`` is of an error; ``rank`` is who said so, if one did."""

    code: str
    why: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Course:
    """How far one coordinator has come. Made by :func:`begin` and :func:`end`, moved by :func:`after`."""

    size: int
    begins: bool
    """Whether the change is this coordinator's own."""
    forced: bool = False
    """Of :func:`end`: also what is open; without, that is another's that may be alive."""
    commits: bool = True
    """Of :func:`end`: what is open and prepared everywhere is committed; else it is given up like the rest."""
    mixed: bool = False
    """Of :func:`begin`: ranks may serve different versions before it."""
    phase: Phase = Phase.LOOK
    transaction: str | None = None
    bases: tuple[str, ...] = ()
    prepared: tuple[Held | None, ...] = ()
    begun: frozenset[int] = frozenset()
    """Ranks that took the command to prepare."""
    opened: bool = False
    """Of :func:`begin`: rank 0 has opened it, or may have: it was asked, and nobody waits for its answer any more."""
    may_commit: bool = False
    asked: bool = False
    """Rank 0 was asked to commit, by this coordinator or by one that saw the same: it may be committed, whatever is
    heard."""
    unchanged: bool = False
    """Every rank has found that it serves this already: the change is given up, and that is no failure."""
    outcome: Outcome | None = None
    failure: Failure | None = None
    away: frozenset[int] = frozenset()
    """Ranks that were not seen to act upon the decision."""


def begin(size: int, transaction: str, *, mixed: bool = False) -> Course:
    """A change of ``size`` ranks. ``transaction`` is new: 128 random bits."""
    return Course(size, begins=True, transaction=transaction, mixed=mixed, prepared=(None,) * size)


def end(size: int, *, forced: bool, commits: bool = True) -> Course:
    """The end of whatever waits for a decision."""
    return Course(size, begins=False, forced=forced, commits=commits)


def asks(course: Course) -> tuple[Ask, ...]:
    """What to ask now, all at once. Nothing when the course is done."""
    everyone = range(course.size)
    transaction = course.transaction
    match course.phase:
        case Phase.LOOK:
            return tuple(Ask(rank, Verb.DESCRIBE) for rank in everyone)
        case Phase.OPEN:
            return (Ask(LEADER, Verb.OPEN, transaction, course.bases[LEADER]),)
        case Phase.PREPARE:
            waiting = [rank for rank in everyone if rank not in course.begun]
            return tuple(Ask(rank, Verb.PREPARE, transaction, course.bases[rank]) for rank in waiting)
        case Phase.WAIT:
            waiting = [rank for rank in everyone if course.prepared[rank] is None]
            return tuple(Ask(rank, Verb.AWAIT, transaction) for rank in waiting)
        case Phase.APPLY:
            return tuple(Ask(rank, Verb.RESOLVE, transaction) for rank in everyone)
        case Phase.DONE:
            return ()
    verb = {Phase.COMMIT: Verb.COMMIT, Phase.ABORT: Verb.ABORT, Phase.READ: Verb.READ}[course.phase]
    return (Ask(LEADER, verb, transaction),)


def after(course: Course, answers: Mapping[int, Answer]) -> Course:
    """The course once every ask of :func:`asks` has its answer, by rank. Silence is asked again, by the same phase."""
    match course.phase:
        case Phase.LOOK:
            return _looked(course, answers)
        case Phase.OPEN:
            return _opened(course, answers[LEADER])
        case Phase.PREPARE | Phase.WAIT:
            return _prepared(course, answers)
        case Phase.APPLY:
            return _applied(course, answers)
    return _decided(course, answers[LEADER])


def given_up(course: Course, why: str) -> Course:
    """The course once the coordinator waits no longer: what it has begun is aborted; what may be decided stays for
    whoever comes next.
    """
    match course.phase:
        case Phase.OPEN | Phase.PREPARE | Phase.WAIT:
            return _abort(dataclasses.replace(course, opened=True), Failure("daemon_not_ready", why))
        case Phase.COMMIT | Phase.ABORT | Phase.READ:
            code = "decision_unknown" if course.asked else "daemon_unreachable"
            failure = course.failure or Failure(code, why, LEADER)
            return dataclasses.replace(course, phase=Phase.DONE, failure=failure)
    return dataclasses.replace(course, phase=Phase.DONE, failure=course.failure or Failure("daemon_unreachable", why))


def _done(course: Course, failure: Failure | None = None) -> Course:
    return dataclasses.replace(course, phase=Phase.DONE, failure=course.failure or failure)


def _abort(course: Course, failure: Failure | None) -> Course:
    return dataclasses.replace(
        course, phase=Phase.ABORT, failure=course.failure or failure, may_commit=False, bases=(), begun=frozenset()
    )


def _looked(course: Course, answers: Mapping[int, Answer]) -> Course:
    silent = _first(answers, Silence, Refusal)
    if silent is not None and (course.begins or silent.rank == LEADER):
        return _done(course, silent)
    seen = [one if isinstance(one := answers[rank], Seen) else None for rank in range(course.size)]
    return _looked_to_begin(course, [one for one in seen if one]) if course.begins else _looked_to_end(course, seen)


def _looked_to_begin(course: Course, seen: Sequence[Seen]) -> Course:
    for rank, one in enumerate(seen):
        waits = one.open or (one.change.transaction if one.change and one.change.waits else None)
        if waits:
            return _done(course, Failure("update_conflict", f"another change is under way: transaction {waits}", rank))
        if one.current is None:
            return _done(course, Failure("daemon_not_ready", "it serves no weights yet that could be replaced", rank))
    current = [one.current for one in seen if one.current]
    if not course.mixed and not same_on_all(current):
        return _done(course, Failure("ranks_disagree", "the ranks serve different versions"))
    bases = tuple(one.generation for one in current)
    return dataclasses.replace(course, phase=Phase.OPEN, bases=bases)


def _looked_to_end(course: Course, seen: Sequence[Seen | None]) -> Course:
    changes = [one.change if one is not None and one.change and one.change.waits else None for one in seen]
    leader = seen[LEADER]
    still_open = leader.open if leader is not None else None
    waiting = [one.transaction for one in changes if one is not None and one.transaction != still_open]
    transaction = waiting[0] if waiting else still_open  # what is decided does not stand in the way of what is open
    if transaction is None:
        return _done(dataclasses.replace(course, transaction=None))
    held = [one.held for one in changes if one is not None and one.transaction == transaction and one.held is not None]
    may_commit = course.commits and len(held) == course.size and same_on_all(held)
    return dataclasses.replace(course, phase=Phase.READ, transaction=transaction, may_commit=may_commit)


def _opened(course: Course, answer: Answer) -> Course:
    if isinstance(answer, Refusal):
        return _done(course, Failure(answer.code, answer.why, LEADER))
    return course if isinstance(answer, Silence) else dataclasses.replace(course, phase=Phase.PREPARE, opened=True)


def _prepared(course: Course, answers: Mapping[int, Answer]) -> Course:
    prepared, begun = list(course.prepared), set(course.begun)
    for rank, answer in answers.items():
        if isinstance(answer, Refusal):
            return _abort(course, Failure(answer.code, answer.why, rank))
        if not isinstance(answer, Seen):
            continue
        change = answer.change
        if change is None or change.transaction != course.transaction:
            return _abort(course, Failure("worker_died", "its daemon ended while it prepared the change", rank))
        if change.state == "committed":  # whoever resolved it saw every rank prepared
            return dataclasses.replace(
                course, phase=Phase.READ, may_commit=False, asked=True, bases=(), begun=frozenset()
            )
        if not change.waits:
            if change.state == "aborted" and answer.stopping:
                return _abort(course, Failure("daemon_draining", _STOPPING, rank))
            if change.state == "aborted":
                return _abort(course, Failure("update_conflict", _ABORTED, rank))
            return _abort(course, Failure(change.code or "worker_died", change.why or "the change failed", rank))
        begun.add(rank)
        prepared[rank] = change.held if change.state == "prepared" else None
    held = [one for one in prepared if one is not None]
    if len(begun) < course.size or len(held) < course.size:
        phase = Phase.PREPARE if len(begun) < course.size else Phase.WAIT
        return dataclasses.replace(course, phase=phase, prepared=tuple(prepared), begun=frozenset(begun))
    unchanged = tuple(one.generation for one in held) == course.bases
    course = dataclasses.replace(course, prepared=tuple(prepared), bases=(), begun=frozenset())
    if not same_on_all(held):
        versions = ", ".join(f"rank {rank} {one.versions.version}" for rank, one in enumerate(held))
        why = f"the ranks prepared different versions, so the files changed, or are not the same for all: {versions}"
        return _abort(course, Failure("checkpoint_changed", why))
    if unchanged:
        return _abort(dataclasses.replace(course, unchanged=True), None)
    return dataclasses.replace(course, phase=Phase.COMMIT, may_commit=True, asked=True)


def _decided(course: Course, answer: Answer) -> Course:
    """After COMMIT, ABORT and READ. The first decision stands, whoever made it: what is refused is read."""
    if isinstance(answer, Silence):
        return course
    if isinstance(answer, Refusal):
        may_commit = course.may_commit and course.phase is not Phase.COMMIT
        return dataclasses.replace(course, phase=Phase.READ, may_commit=may_commit)
    if not isinstance(answer, Decision):
        return _done(course, Failure("protocol", "rank 0 answered something else than a decision", LEADER))
    if answer.outcome is Outcome.OPEN:
        if course.begins or course.forced:
            if course.may_commit:
                return dataclasses.replace(course, phase=Phase.COMMIT, asked=True)
            return dataclasses.replace(course, phase=Phase.ABORT)
        return _done(course, Failure("update_conflict", f"another change is under way: {course.transaction}", LEADER))
    if answer.outcome is Outcome.UNKNOWN:
        return dataclasses.replace(course, phase=Phase.ABORT, may_commit=False)
    failure = course.failure
    if course.begins:
        aborted = Failure("update_conflict", _ABORTED, LEADER)
        as_wanted = answer.outcome.is_commit or course.unchanged
        failure = None if as_wanted else (failure or aborted)
    return dataclasses.replace(course, phase=Phase.APPLY, outcome=answer.outcome, failure=failure, may_commit=False)


def _applied(course: Course, answers: Mapping[int, Answer]) -> Course:
    away = {
        rank
        for rank, answer in answers.items()
        if not isinstance(answer, Seen)
        or (answer.change and answer.change.transaction == course.transaction and answer.change.waits)
    }
    refused = _first(answers, Refusal)
    course = dataclasses.replace(course, away=frozenset(away))
    if course.begins or away or refused:
        return _done(course, refused)
    return dataclasses.replace(course, phase=Phase.LOOK, transaction=None)  # perhaps there is more to end


def _first(answers: Mapping[int, Answer], *kinds: type[Silence] | type[Refusal]) -> Failure | None:
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, kinds):
            return Failure(answer.code, answer.why, rank)
    return None
