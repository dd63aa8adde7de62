"""Update and roll back the live weights of a group, all ranks or none; end what was left; look at what is held.

Owns what these mean: which source, which checks before anything is begun, and which error tells why nothing changed.
``coordinator.py`` carries changes out. These are coroutines; ``weightcached.client.control`` has the blocking ones.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from weightcached.client.control.coordinator import Coordinator, Told, held, nobody
from weightcached.client.control.course import Course, Failure, begin, end
from weightcached.client.control.group import Group, find_group
from weightcached.protocol.control import Drop, FromCheckpoint, FromHeld, Pin, RankState, Source
from weightcached.protocol.control_channel import ask
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    ERRORS_BY_CODE,
    DecisionUnknown,
    GenerationGone,
    UpdateConflict,
    WeightCacheError,
)
from weightcached.protocol.hub import resolve as resolve_model
from weightcached.protocol.messages import GenerationInfo
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import DEFAULT_NAME, Place, runtime_directory
from weightcached.protocol.transaction import Versions

TIMEOUT_S = 3600.0
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Where:
    """The group that is meant, and how long anything about it may take."""

    runtime_dir: Path
    name: str
    deadline: Deadline
    allowed: AllowList

    @classmethod
    def of(
        cls,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        name: str = DEFAULT_NAME,
        timeout_s: float = TIMEOUT_S,
        allowed: AllowList | None = None,
    ) -> Self:
        return cls(runtime_directory(runtime_dir), name, Deadline.after(timeout_s), allowed or AllowList())

    async def group(self) -> Group:
        return await find_group(self.runtime_dir, self.name, deadline=self.deadline, allowed=self.allowed)


@dataclass(frozen=True, slots=True)
class Changed:
    """A change that was committed."""

    transaction: str
    version: str
    """What all ranks serve now."""
    before: str
    away: tuple[str, ...]
    """Ranks that were not seen to switch: they read rank 0's record by themselves, and grant nothing else meanwhile to
    engines that ask for rank 0's version."""
    seconds: float


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

    ``keep``: how many earlier generations stay for rollback. ``wait``: for another change that is under way, and until
    every rank was seen to switch. ``force``: end another change that is open. ``align``: also where ranks serve
    different versions now. Raises the error of the rank that could not; then nothing has changed anywhere.
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

    Raises GenerationGone with who holds it and who does not.
    """
    group = await where.group()
    group.require_whole()
    version = _held_by_all(group, to)
    return await change(where, FromHeld(version=version), wait=wait, force=force, align=align, told=told)


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
) -> Changed:
    """One change of all ranks, from whatever source. ``begun`` is awaited with the transaction once every rank has
    begun to prepare it: a trainer pushes then. The other parameters are :func:`update`'s.
    """
    started_s = time.monotonic()
    group = await where.group()
    group.require_whole()
    await _end_others(where, group, wait=wait, force=force, told=told)
    group = await where.group()
    group.require_whole()
    before = _current(group)
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
    if course.outcome is None or not course.outcome.is_commit:
        raise _error(group, course.failure)
    away = course.away
    while wait and away and not where.deadline.passed:
        await asyncio.sleep(_PAUSE_S)  # a rank that is away reads the record when it is back; nothing announces it
        resolved = await _ended(where, group, force=False, told=told)
        away = resolved.away if resolved.transaction is not None else frozenset()
    prepared = next(one for one in course.prepared if one is not None) if any(course.prepared) else None
    return Changed(
        transaction,
        prepared.versions.version if prepared is not None else "",
        before,
        tuple(group.members[rank].word for rank in sorted(away)),
        time.monotonic() - started_s,
    )


async def resolve(where: Where, *, told: Told = nobody) -> tuple[Group, Course]:
    """End what is open or prepared in the group, whoever began it, as rank 0's record says; what is open is committed
    if every rank has it prepared in one version, and else aborted. Ranks that are away read the record later.

    Raises why it could not be ended.
    """
    group = await where.group()
    course = await _ended(where, group, force=True, told=told)
    if course.failure is not None:
        raise _error(group, course.failure)
    return await where.group(), course


async def _end_others(where: Where, group: Group, *, wait: bool, force: bool, told: Told) -> None:
    """What was decided and not read everywhere is no obstacle; what is open is another's, unless ``force``."""
    while True:
        course = await _ended(where, group, force=force, told=told)
        if course.failure is None:
            return
        if not wait or where.deadline.passed or course.failure.code != UpdateConflict.code:
            raise _error(group, course.failure)
        await asyncio.sleep(_PAUSE_S)


async def _ended(where: Where, group: Group, *, force: bool, told: Told) -> Course:
    coordinator = Coordinator(group, deadline=where.deadline, allowed=where.allowed, told=told)
    return await coordinator.run(end(len(group.members), forced=force))


def _error(group: Group, failure: Failure | None) -> WeightCacheError:
    """Why nothing changed, as the error that the rank gave, with its name."""
    if failure is None:
        return UpdateConflict("the change was not committed", where=group.where)
    kind = ERRORS_BY_CODE.get(failure.code, WeightCacheError)
    if kind is DecisionUnknown:
        return DecisionUnknown(
            f"it is not known whether the change was committed: {failure.why}",
            expected="rank 0's record: committed everywhere, or nowhere",
            where=group.where,
            next_step="`weightcached update --resolve`, once rank 0 answers",
        )
    who = f" on rank {group.members[failure.rank].word}" if failure.rank is not None else ""
    steps = {
        "update_conflict": "wait for it; if whoever began it is gone, `weightcached update --resolve` ends it",
        "ranks_disagree": "`weightcached generations` shows what each has; --align makes them one all the same",
    }
    try:
        return kind(
            f"the weights were not changed{who}: {failure.why}",
            where=group.where,
            next_step=None if "next step" in failure.why else steps.get(failure.code),
        )
    except TypeError:  # the error of a difference between two configs is made from its fields
        return WeightCacheError(f"the weights were not changed{who}: {failure.why}", where=group.where)


def _current(group: Group) -> str:
    state = group.leader.state
    current = state.generation(state.current) if state is not None else None
    return current.version if current is not None else "none"


def _held_by_all(group: Group, to: str | None) -> str:
    """The version that is meant, as rank 0 knows it. Raises GenerationGone unless every rank can serve it."""
    states = group.states()
    leading = [one for one in states[0][1].generations if one.standing != "prepared"]
    if to is None:
        earlier = [one for one in leading if one.standing == "previous"]
        if not earlier:
            raise GenerationGone(
                "there is nothing to roll back to",
                expected="a generation that was served before",
                found="only the current one at rank 0",
                where=group.where,
                next_step="update to its checkpoint instead",
            )
        wanted = earlier[0]
    else:
        wanted = _one(leading, to, group)
    lacking = [member.word for member, state in states if not any(_is(one, wanted) for one in state.generations)]
    if lacking:
        raise GenerationGone(
            "not every rank holds this version any more",
            expected=wanted.version,
            found=f"not at {', '.join(lacking)}",
            where=group.where,
            next_step="update to its checkpoint instead",
        )
    return wanted.version


def _is(one: GenerationInfo, other: GenerationInfo) -> bool:
    return one.standing != "prepared" and held(one).versions.same(held(other).versions)


def _one(infos: list[GenerationInfo], word: str, group: Group) -> GenerationInfo:
    """The one generation or version that ``word`` is, or is the beginning of."""
    found = [one for one in infos if _matches(one, word)]
    if not found:
        known = ", ".join(one.version for one in infos) or "none"
        raise GenerationGone("no such version or generation is held", expected=word, found=known, where=group.where)
    first = found[0]
    if any(not held(first).versions.same(Versions(one.version, one.receipts_version)) for one in found):
        several = ", ".join(one.version for one in found)
        raise GenerationGone("several versions begin so", expected=word, found=several, where=group.where)
    return first


def _matches(one: GenerationInfo, word: str) -> bool:
    if not word:
        return False
    words = (one.generation, one.version, one.receipts_version)
    return any(known.startswith(word) or known.partition(":")[2].startswith(word) for known in words)


# One generation at each rank


async def pin(where: Where, word: str, *, pinned: bool = True) -> Group:
    """Keep a version (or one rank's generation) whatever would have it freed, or no longer. ``word``: or its
    beginning. The group afterwards."""
    group = await where.group()
    for place, generation in _where_held(group, word):
        await _ask(where, place, Pin(generation=generation, pinned=pinned))
    return await where.group()


async def drop(where: Where, word: str, *, force: bool = False) -> Group:
    """Free a version (or one rank's generation) that is neither served nor part of a change. ``force``: also one that
    is pinned or leased. The group afterwards."""
    group = await where.group()
    for place, generation in _where_held(group, word):
        await _ask(where, place, Drop(generation=generation, force=force))
    return await where.group()


async def _ask(where: Where, place: Place, request: Pin | Drop) -> RankState:
    return await ask(place, request, RankState, deadline=where.deadline, allowed=where.allowed)


def _where_held(group: Group, word: str) -> list[tuple[Place, str]]:
    """The generations that ``word`` means: at one rank, or one version at all that hold it."""
    states = group.states()
    meant = _one([one for _, state in states for one in state.generations], word, group)
    if meant.generation.startswith(word):
        return [(_place(group, meant.generation), meant.generation)]
    return [
        (_place(group, one.generation), one.generation)
        for _, state in states
        for one in state.generations
        if held(one).versions.same(held(meant).versions)
    ]


def _place(group: Group, generation: str) -> Place:
    for member, state in group.states():
        if member.place is not None and state.generation(generation) is not None:
            return member.place
    raise GenerationGone("the generation is held no more", expected=generation, where=group.where)
