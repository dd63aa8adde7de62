"""Carries out the course of a change: asks the ranks of a group what ``course.py`` says, all at once, and tells it.

Owns the translation between the course's words and messages, whom to ask, patience, and what is shown meanwhile. No
decision is made here. Whoever runs it may die at any point: what it has begun is ended by the next, or by the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightcached.client.control.course import (
    LEADER,
    Answer,
    Ask,
    Change,
    Course,
    Phase,
    Refusal,
    Seen,
    Silence,
    Verb,
    after,
    asks,
    given_up,
)
from weightcached.client.control.group import Group, Member
from weightcached.protocol.control import (
    AwaitChange,
    Decide,
    Decided,
    Describe,
    Open,
    Prepare,
    RankState,
    ReadDecision,
    Resolve,
    Source,
)
from weightcached.protocol.control_channel import ask, look
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonDraining,
    DaemonNotReady,
    DaemonUnreachable,
    UpdateConflict,
    WeightCacheError,
)
from weightcached.protocol.messages import GenerationInfo, Message, Report, Status
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place
from weightcached.protocol.transaction import Decision, Held, Outcome, Versions

SLICE_S = 1.0
"""For how long one rank prepares before what the others say is looked at."""
DECIDING_S = 30.0
"""What deciding, and telling all, may take beyond the time that was given for preparing."""
PATIENCE_S = 5.0
"""For how long a daemon may be away in the middle of a change; a keeper that is started again is back within."""
ANSWER_S = 30.0
"""For how long a daemon that is there may take over one answer: none of them waits for a load."""
APPLYING_S = 8.0
"""Within which a rank is asked again to act upon a decision, where it could not read the leader's record."""
LAST_LOOK_S = 2.0
"""For finding out who is late, once the time is over."""
GIVING_UP_S = 4.0
"""What giving up a change may then take, beyond the time that was given."""
_PAUSE_S = 0.1

_MAY_COME_BACK = (DaemonUnreachable, DaemonNotReady)
_GONE = (DaemonAbsent.code, DaemonDraining.code)
"""Of errors of a rank that is not expected to come back."""
_BEGINNING = (Verb.DESCRIBE, Verb.OPEN, Verb.PREPARE, Verb.AWAIT)


@dataclass(frozen=True, slots=True)
class Step:
    """What a coordinator does now, for whoever watches. ``reports`` say how far each rank is, by its word."""

    phase: Phase
    transaction: str | None
    reports: tuple[tuple[str, Report], ...] = ()
    asked: bool = False
    """Whether something may be committed already that was not before, whatever becomes of this coordinator."""
    waits_for: str = ""
    """The change of somebody else that is waited for, and how far each rank is with it."""
    left: bool = False
    """Whoever makes the change stops here, and rank 0 has not confirmed that it is given up: it may be open still."""


Told = Callable[[Step], None]


def nobody(_: Step) -> None:
    """Nobody watches."""


class Coordinator:
    """For one group. ``deadline`` is for finding, opening and preparing; giving up has six seconds beyond it at most,
    a commit thirty.
    """

    def __init__(
        self,
        group: Group,
        *,
        deadline: Deadline,
        allowed: AllowList,
        source: Source | None = None,
        keep: int | None = None,
        told: Told = nobody,
        begun: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._group = group
        self._deadline = deadline
        self._latest = Deadline(deadline.at_s + DECIDING_S)
        self._allowed = allowed
        self._source = source
        self._keep = keep
        self._told = told
        self._begun = begun

    async def run(self, course: Course) -> Course:
        """The course once it is done. ``begun`` is awaited beside it from the moment that every rank prepares; if it
        raises, the change is aborted, and then the error raised.
        """
        pushing: asyncio.Task[None] | None = None
        try:
            while asked := asks(course):
                self._told(Step(course.phase, course.transaction, asked=course.asked))
                before = course
                answers = await self._answers(asked)
                course = after(course, answers)
                if self._begun is not None and pushing is None and course.phase in (Phase.WAIT, Phase.COMMIT):
                    pushing = asyncio.ensure_future(self._begun(str(course.transaction)))
                if before.phase is course.phase:
                    course = await self._again(course, answers, pushing)
                if course.phase is Phase.ABORT and before.phase is not Phase.ABORT:
                    self._hurry(course)
            if pushing is not None:
                if course.failure is not None:
                    pushing.cancel()
                await asyncio.wait({pushing})
                if not pushing.cancelled() and (error := pushing.exception()) is not None:
                    raise error
            return course
        except BaseException:
            await self._leave(course)
            raise
        finally:
            if pushing is not None:
                pushing.cancel()
                await asyncio.wait({pushing})

    async def _leave(self, course: Course) -> None:
        """Whoever runs this was told to stop, or met an error that is no rank's: a change that nobody was asked to
        commit is given up, if rank 0 answers at once.

        If not, it stays open for whoever comes next, as if we had been killed, and whoever watches is told so.
        """
        undecided = course.phase in (Phase.OPEN, Phase.PREPARE, Phase.WAIT, Phase.ABORT, Phase.READ)
        if not (course.begins and undecided) or course.asked:
            return
        self._latest = Deadline.after(PATIENCE_S)
        answer = await self._answer(Ask(LEADER, Verb.ABORT, course.transaction))
        if not (isinstance(answer, Decision) and answer.outcome is Outcome.ABORTED):
            self._told(Step(course.phase, course.transaction, left=True))

    def _hurry(self, course: Course) -> None:
        """Nothing will change any more: what is left is to have it written down, for which a rank that has ended is not
        waited for as long as one that may be back.
        """
        gone = course.failure is not None and course.failure.code in _GONE
        soon = Deadline.after(GIVING_UP_S)
        latest = soon if gone else Deadline(max(soon.at_s, self._deadline.at_s)).within(DECIDING_S)
        self._latest = Deadline(min(self._latest.at_s, latest.at_s))

    async def _again(self, course: Course, answers: Mapping[int, Answer], pushing: asyncio.Task[None] | None) -> Course:
        """The same is to be asked once more: not for ever."""
        beginning = course.phase in (Phase.OPEN, Phase.PREPARE, Phase.WAIT)
        if beginning and pushing is not None and pushing.done() and pushing.exception() is not None:
            return given_up(course, "what was to be pushed was not")
        if beginning and self._deadline.passed:
            return await self._late(course)
        absent = not beginning and any(
            isinstance(one, Silence) and one.code == DaemonAbsent.code for one in answers.values()
        )
        if not beginning and (absent or self._latest.passed):
            found = "no weights are cached there any more" if absent else "no answer in time"
            return given_up(course, f"{self._words(asks(course))}: {found}")
        if course.phase is Phase.WAIT and (gone := self._released()):
            return after(course, gone)
        if course.phase is Phase.WAIT:
            await self._show(course)
        else:
            await asyncio.sleep(_PAUSE_S)  # nothing announces a daemon that comes back
        return course

    def _released(self) -> dict[int, Refusal]:
        """Ranks whose place has no daemon any more, also those that had prepared it and are not asked."""
        found = {}
        for number, member in enumerate(self._group.members):
            try:
                if member.place is not None:
                    look(member.place, member.place.control_path, self._allowed)
            except DaemonAbsent as error:
                found[number] = Refusal(error.code, str(error))
            except WeightCacheError:
                continue  # said by what it is asked, if that matters
        return found

    async def _late(self, course: Course) -> Course:
        """The time for preparing is over: given up, with the names of those who are not prepared now. Where one kept
        its answer to itself, others may have become so meanwhile.
        """
        answers: Mapping[int, Answer] = {}
        if course.phase is Phase.WAIT:
            self._deadline = Deadline.after(LAST_LOOK_S)
            answers = await self._answers(asks(course))
            course = after(course, answers)
            if course.phase is not Phase.WAIT:
                return course
        busy = [one for one in asks(course) if isinstance(answers.get(one.rank), Seen)]
        silent = [one for one in asks(course) if one not in busy]
        found = [f"{self._words(busy)}: not prepared in time"] if busy else []
        found += [f"{self._words(silent)}: no answer in time"] if silent else []
        return given_up(course, "; ".join(found))

    def _words(self, asked: Iterable[Ask]) -> str:
        return ", ".join(self._group.members[one.rank].word for one in asked)

    async def _answers(self, asked: tuple[Ask, ...]) -> dict[int, Answer]:
        answers = await asyncio.gather(*(self._answer(one) for one in asked))
        return {one.rank: answer for one, answer in zip(asked, answers, strict=True)}

    async def _answer(self, one: Ask) -> Answer:
        member = self._group.members[one.rank]
        if member.place is None:
            return Silence("nobody is known to be this rank")
        deadline = (self._deadline if one.verb in _BEGINNING else self._latest).within(ANSWER_S)
        if one.verb is Verb.AWAIT:
            deadline = deadline.within(SLICE_S + PATIENCE_S)  # what the others say is not to be missed
        soon = deadline.within(APPLYING_S)
        while True:
            answer = await self._answered(one, member.place, deadline)
            applies = one.verb is Verb.RESOLVE and not _has_applied(answer, one.transaction)
            if not applies or soon.passed:
                return answer
            await asyncio.sleep(_PAUSE_S)  # it could not read the leader's record just then: both may be busy

    async def _answered(self, one: Ask, place: Place, deadline: Deadline) -> Answer:
        request, answer = self._request(one)
        try:
            found = await ask(place, request, answer, deadline=deadline, patience_s=PATIENCE_S, allowed=self._allowed)
        except DaemonDraining as error:
            return Refusal(error.code, str(error)) if one.verb in _BEGINNING else Silence(str(error), error.code)
        except _MAY_COME_BACK as error:
            return Silence(str(error), error.code)
        except UpdateConflict as error:
            return Refusal(error.code, str(error))
        except WeightCacheError as error:
            if one.verb in (Verb.COMMIT, Verb.ABORT, Verb.READ):
                return Silence(str(error), error.code)  # only what is written decides
            return Refusal(error.code, str(error))
        return seen(found) if isinstance(found, RankState) else found.decision

    def _request(self, one: Ask) -> tuple[Message, type[RankState] | type[Decided]]:
        transaction = one.transaction or ""
        match one.verb:
            case Verb.DESCRIBE:
                return Describe(), RankState
            case Verb.OPEN:
                return Open(transaction=transaction, base=one.base or ""), RankState
            case Verb.PREPARE:
                if self._source is None:
                    raise ValueError("a change needs a source")
                leader = self._leader()
                return (
                    Prepare(
                        transaction=transaction,
                        leader=leader,
                        base=one.base or "",
                        source=self._source,
                        keep_previous=self._keep,
                    ),
                    RankState,
                )
            case Verb.AWAIT:
                timeout_s = min(SLICE_S, self._deadline.remaining_s())
                return AwaitChange(transaction=transaction, timeout_s=timeout_s), RankState
            case Verb.COMMIT | Verb.ABORT:
                return Decide(transaction=transaction, commit=one.verb is Verb.COMMIT), Decided
            case Verb.READ:
                return ReadDecision(transaction=transaction), Decided
        return Resolve(transaction=transaction), RankState

    def _leader(self) -> str:
        place = self._group.leader.place
        return place.device if place is not None else ""

    async def _show(self, course: Course) -> None:
        """How far those are who are waited for."""
        waiting = [self._group.members[one.rank] for one in asks(course)]
        deadline = self._deadline.within(SLICE_S)
        reports = await reports_of(waiting, self._told, deadline=deadline, allowed=self._allowed)
        self._told(Step(course.phase, course.transaction, reports, course.asked))


async def reports_of(
    members: Sequence[Member], told: Told, *, deadline: Deadline, allowed: AllowList
) -> tuple[tuple[str, Report], ...]:
    """How far those of ``members`` are that answer, by their word, for ``told``: nothing where nobody watches."""

    async def report(member: Member) -> Report | None:
        if member.place is None or told is nobody:
            return None
        try:
            return await ask(member.place, Status(), Report, deadline=deadline, patience_s=0, allowed=allowed)
        except WeightCacheError:
            return None  # it is only shown; whether it answers is seen by what it is asked

    reports = await asyncio.gather(*map(report, members))
    return tuple((one.word, report) for one, report in zip(members, reports, strict=True) if report is not None)


def held(info: GenerationInfo) -> Held:
    return Held(info.generation, Versions(info.version, info.receipts_version))


def seen(state: RankState) -> Seen:
    """What of a rank's state a course looks at."""
    current = state.generation(state.current)
    change: Change | None = None
    if state.change is not None:
        info = state.generation(state.change.generation)
        change = Change(
            state.change.transaction,
            state.change.state,
            held(info) if info is not None else None,
            state.change.error or "",
            state.change.error_code or "",
        )
    stopping = state.state in ("draining", "stopped")
    return Seen(held(current) if current is not None else None, change, state.open, stopping)


def _has_applied(answer: Answer, transaction: str | None) -> bool:
    """Whether a rank is known not to wait any more for the decision about that change; or says why it never will."""
    if isinstance(answer, Seen):
        return answer.change is None or answer.change.transaction != transaction or not answer.change.waits
    return isinstance(answer, Refusal)
