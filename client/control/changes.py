"""Update and roll back the live weights of a group, all ranks or none; end what was left.

Owns what these mean: which source, which checks before anything is begun, and which error tells why nothing changed.
``coordinator.py`` carries changes out. These are coroutines; ``weightcached.client.control`` has the blocking ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from weightcached.client.control.coordinator import Coordinator, Step, Told, held, nobody, reports_of
from weightcached.client.control.course import LEADER, Course, Failure, Phase, begin, end
from weightcached.client.control.group import Group, Member, Where
from weightcached.client.control.holding import held_by_all
from weightcached.client.options import checked_flags, checked_text, is_whole_number
from weightcached.protocol.control import GENERATIONS_MAX, FromCheckpoint, Source
from weightcached.protocol.errors import (
    ERRORS_BY_CODE,
    DaemonAbsent,
    DaemonNotReady,
    DaemonUnreachable,
    DecisionUnknown,
    GenerationGone,
    InvalidOption,
    UpdateConflict,
    WeightCacheError,
)
from weightcached.protocol.hub import resolve as resolve_model
from weightcached.protocol.places import DEFAULT_NAME
from weightcached.protocol.text import shown
from weightcached.protocol.transaction import Versions

KEEP_MAX = GENERATIONS_MAX - 1
"""Earlier generations beside the one that is served."""
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Changed:
    """A change that was committed; or, ``already``, one to what every rank serves: nothing has changed then."""

    transaction: str
    version: str
    """What all ranks serve now."""
    before: str
    """What rank 0 served."""
    serving: tuple[str, ...]
    """Ranks that were seen to serve it."""
    away: tuple[str, ...]
    """Ranks that were not seen to switch: they read rank 0's record by themselves, and grant nothing else meanwhile to
    engines that ask for rank 0's version."""
    seconds: float
    already: bool
    differed: tuple[tuple[str, str], ...] = ()
    """Ranks that served something else than rank 0 before, and what: with ``align`` only."""


async def update(
    where: Where,
    model: str | os.PathLike[str],
    *,
    keep: int | None = None,
    wait: bool = False,
    force: bool = False,
    align: bool = False,
    told: Told = nobody,
) -> Changed:
    """Have all ranks load ``model``, a directory or a hub id, beside what they serve, and then switch.

    ``keep``: how many earlier generations stay for rollback. ``wait``: for ranks that still load or do not answer yet,
    for another change that is under way, and until every rank was seen to switch. ``force``: give up another change
    that is open, however far it has come. ``align``: also where ranks serve different versions now. Raises the error of
    the rank that could not; then nothing that is served has changed.
    """
    source = await asyncio.to_thread(_checkpoint, model)
    return await change(where, source, keep=keep, wait=wait, force=force, align=align, told=told)


def _checkpoint(model: str | os.PathLike[str]) -> FromCheckpoint:
    model_dir = resolve_model(model)
    hub_id = None if model_dir == Path(model) else str(model)
    return FromCheckpoint(model_dir=str(model_dir.absolute()), hub_id=hub_id)


async def rollback(
    where: Where,
    to: str | None = None,
    *,
    wait: bool = False,
    force: bool = False,
    align: bool = False,
    told: Told = nobody,
) -> Changed:
    """Have all ranks serve a version again that they hold: ``to``, its beginning, or else the one before this one.

    "This one" is what rank 0 serves when it is asked for, once every rank is there: that is what is to be taken back.
    Where another change that was waited for has taken it back already, all is well (:attr:`Changed.already`); where one
    has put another version in its place, nothing is changed: GenerationGone. So it is where some rank does not hold the
    version any more, with who does not.
    """
    if to is not None:
        checked_text("version to roll back to", to)
    checked_flags(wait=wait, force=force, align=align)
    group = await _whole(where, wait=wait, told=told)
    source, taken_back = held_by_all(group, to), _served(group)

    def require_served(now: Group) -> None:
        served = _served(now)
        if taken_back is None or served is None or served.same(taken_back):
            return
        if {served.version, served.receipts_version}.intersection(source.versions):
            return
        raise GenerationGone(
            "another change was decided first, and what was to be taken back is not served any more",
            expected=taken_back.version,
            found=f"{served.version} at rank 0",
            where=now.where,
            next_step="`weightcached generations` shows what is held: say which it is to be with --to",
        )

    require = require_served if to is None else None
    return await change(where, source, wait=wait, force=force, align=align, told=told, require=require)


async def change(
    where: Where,
    source: Source,
    *,
    keep: int | None = None,
    wait: bool = False,
    force: bool = False,
    align: bool = False,
    told: Told = nobody,
    begun: Callable[[str], Awaitable[None]] | None = None,
    require: Callable[[Group], None] | None = None,
) -> Changed:
    """One change of all ranks, from whatever source. ``begun`` is awaited with the transaction once every rank has
    begun to prepare it: a trainer pushes then. ``require`` is called with the group once no other change is in the way:
    what it raises ends this before anything is begun. The other parameters are :func:`update`'s.
    """
    started_s = time.monotonic()
    checked_flags(wait=wait, force=force, align=align)
    if keep is not None and not (is_whole_number(keep) and 0 <= keep <= KEEP_MAX):
        raise InvalidOption("unusable number of earlier generations", expected=f"0 to {KEEP_MAX}", found=shown(keep))
    group = await _whole(where, wait=wait, told=told)
    again = force  # what came in between is given up like what was there, once; there may be no end of it
    while True:
        await _end_others(where, group, wait=wait, force=force, told=told)
        group = await where.group()
        group.require_whole()
        if require is not None:
            require(group)
        before = current_version(group)
        transaction = secrets.token_hex(16)
        coordinator = Coordinator(
            group,
            deadline=where.deadline,
            allowed=where.allowed,
            source=source,
            keep=keep,
            told=told,
            begun=begun,
        )
        course = await coordinator.run(begin(len(group.members), transaction, mixed=align))
        if not (wait or again) or where.deadline.passed or not _was_late(course):
            break
        again = False
    if course.outcome is None or not (course.outcome.is_commit or course.unchanged):
        raise _error(group, course.failure, left=course.opened and course.outcome is None)
    if not course.outcome.is_commit:
        everyone = tuple(one.word for one in group.members)
        return Changed(transaction, before, before, everyone, (), time.monotonic() - started_s, already=True)
    made = next((one.versions for one in course.prepared if one is not None), None)
    away = [group.members[rank].word for rank in sorted(course.away)]
    while wait and away and made is not None and not where.deadline.passed:
        await asyncio.sleep(_PAUSE_S)  # a rank that is away reads the record when it is back; nothing announces it
        away = _not_serving(await _seen(where, group), made)
    version = made.version if made is not None else current_version(await _seen(where, group))
    return Changed(
        transaction,
        version,
        before,
        serving=tuple(one.word for one in group.members if one.word not in away),
        away=tuple(away),
        seconds=time.monotonic() - started_s,
        already=False,
        differed=_differed(group),
    )


async def _whole(where: Where, *, wait: bool, told: Told) -> Group:
    """The group, every rank of it. ``wait`` for those that do not answer yet, and for those on the way to the weights
    that they serve first: where the time is over, the course of the change says who.
    """
    while True:
        waits = wait and where.deadline.remaining_s() > 2 * _PAUSE_S
        coming: list[Member] = []
        try:
            group = await where.group()
            group.require_whole()
            coming = group.coming
            if not (waits and coming):
                return group
        except (DaemonUnreachable, DaemonNotReady):
            if not waits:
                raise
        told(Step(Phase.LOOK, None, await reports_of(coming, told, deadline=where.deadline, allowed=where.allowed)))
        await asyncio.sleep(_PAUSE_S)  # nothing announces that a rank is ready


def _was_late(course: Course) -> bool:
    """Another is in the way, after we had found none: ours never was opened, and nobody has begun it."""
    return not course.opened and course.failure is not None and course.failure.code == UpdateConflict.code


def _differed(group: Group) -> tuple[tuple[str, str], ...]:
    """The ranks that serve something else than rank 0, and what."""
    served = [(member.word, state.generation(state.current)) for member, state in group.states()]
    first = served[0][1]
    if first is None:
        return ()
    others = [(word, one) for word, one in served if one is not None]
    return tuple((word, one.version) for word, one in others if not held(one).versions.same(held(first).versions))


async def _seen(where: Where, group: Group) -> Group:
    """The group as it is now. Where it cannot be seen, as when no daemon answers, every rank counts as away: once
    something is decided that is no error.
    """
    try:
        return await where.group()
    except WeightCacheError:
        members = tuple(dataclasses.replace(one, state=None) for one in group.members)
        return dataclasses.replace(group, members=members)


def _not_serving(group: Group, versions: Versions) -> list[str]:
    """The ranks that were not seen to serve it."""
    serving = {
        member.word
        for member, state in group.states()
        if (current := state.generation(state.current)) is not None and held(current).versions.same(versions)
    }
    return [one.word for one in group.members if one.word not in serving]


async def resolve(where: Where, *, told: Told = nobody) -> tuple[Group, Course]:
    """End what is open or prepared in the group, whoever began it, as rank 0's record says; what is open is committed
    if every rank has it prepared in one version, and else aborted. Ranks that are away read the record later: in the
    group as it is afterwards they have no state.

    Raises why it could not be ended, unless it was committed all the same: then the course says what is amiss.
    """
    group = await where.group()
    course = await _ended(where, group, force=True, commits=True, told=told)
    if course.failure is not None and not (course.outcome is not None and course.outcome.is_commit):
        raise _error(group, course.failure)
    return await _seen(where, group), course


async def _end_others(where: Where, group: Group, *, wait: bool, force: bool, told: Told) -> None:
    """What was decided and not read everywhere is no obstacle; what is open is another's, unless ``force``: then it is
    given up. Committed, it would be what is served if ours fails, and cost what can be rolled back to.
    """
    while True:
        course = await _ended(where, group, force=force, commits=False, told=told)
        if course.failure is None:
            return
        waits = wait and where.deadline.remaining_s() > 2 * _PAUSE_S
        if not waits or course.failure.code != UpdateConflict.code:
            raise _error(group, course.failure)
        told(Step(Phase.LOOK, course.transaction, waits_for=_progress(await where.group(), course.transaction)))
        await asyncio.sleep(_PAUSE_S)


def _progress(group: Group, transaction: str | None) -> str:
    """How far each rank is with that change, for people: whose it is nobody knows, and whether he is alive."""
    states = [
        f"{member.word} {state.change.state}"
        for member, state in group.states()
        if state.change is not None and state.change.transaction == transaction
    ]
    return f"transaction {transaction} ({', '.join(states) or 'open, and not begun at any rank'})"


async def _ended(where: Where, group: Group, *, force: bool, commits: bool, told: Told) -> Course:
    coordinator = Coordinator(group, deadline=where.deadline, allowed=where.allowed, told=told)
    return await coordinator.run(end(len(group.members), forced=force, commits=commits))


def _error(group: Group, failure: Failure | None, *, left: bool = False) -> WeightCacheError:
    """Why nothing changed, as the error that the rank gave, with its name. ``left``: rank 0 did not confirm that the
    change is given up; where its place is gone, so is its record, and nothing is open there.
    """
    if failure is None:
        return UpdateConflict("the change was not committed", where=group.where)
    kind = ERRORS_BY_CODE.get(failure.code, WeightCacheError)
    if kind is DecisionUnknown:
        return DecisionUnknown(
            f"it is not known whether the change of {group.where} was committed, everywhere or nowhere, as rank 0's "
            f"record says: {failure.why}",
            next_step="`weightcached update --resolve`, once rank 0 answers",
        )
    who = f" on rank {group.members[failure.rank].word}" if failure.rank is not None else ""
    named = "" if group.name == DEFAULT_NAME else f" --name {group.name}"
    steps = {
        "update_conflict": f"wait for it; if whoever began it is gone, `weightcached update --resolve{named}` ends it",
        "ranks_disagree": f"`weightcached generations{named}` shows what each has; --align makes them one all the same",
        "daemon_not_ready": f"`weightcached status{named}` shows what the ranks do; --wait, or allow more time",
    }
    left = left and (failure.rank, kind) != (LEADER, DaemonAbsent)
    open_still = f" (it may still be open at rank 0: `weightcached update --resolve{named}` ends it)" if left else ""
    # The reason may end with a place and a step of its own: what is added to it comes before.
    message = f"the weights of {group.where} were not changed{who}{open_still}: {failure.why}"
    try:
        return kind(message, next_step=None if "next step" in failure.why else steps.get(failure.code))
    except TypeError:  # the error of a difference between two configs is made from its fields
        return WeightCacheError(message)


def current_version(group: Group) -> str:
    """What rank 0 serves, for people."""
    served = _served(group)
    return served.version if served is not None else "none"


def _served(group: Group) -> Versions | None:
    """What rank 0 serves."""
    state = group.leader.state
    current = state.generation(state.current) if state is not None else None
    return held(current).versions if current is not None else None
