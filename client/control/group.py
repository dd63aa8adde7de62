"""Which daemons are the ranks of one model here: all places of one name in a runtime directory, as they say themselves.

Owns finding them, and telling whether they are all: every rank of the sizes that they state, once. A group is on one
host. Changes nothing; used by everything that is about more than one rank.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from weightcached.client.options import checked_seconds
from weightcached.protocol.config import Parallel
from weightcached.protocol.control import Describe, RankInfo, RankState
from weightcached.protocol.control_channel import ask
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonNotReady,
    DaemonUnreachable,
    InvalidOption,
    NotReadyError,
    RanksDisagree,
    WeightCacheError,
)
from weightcached.protocol.named_places import nobody_there, places_with_socket
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import DEFAULT_NAME, Place, place_name, runtime_directory
from weightcached.protocol.ranks import KINDS, every_rank, rank_word
from weightcached.protocol.text import shown

PATIENCE_S = 3.0
"""For how long a daemon that is being started again is waited for while all are looked for."""
ANSWER_S = 15.0
"""For how long one that is there may take to say what it is."""


TIMEOUT_S = 3600.0
"""For a change, where nobody says otherwise."""
_COMING = frozenset({"starting", "adopting", "loading"})
"""States of a daemon that is on its way to the first weights that it serves."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank. ``place`` and ``state`` are ``None`` where no daemon answers for it."""

    word: str
    """``tp0of2``: for people."""
    place: Place | None
    state: RankState | None


@dataclass(frozen=True, slots=True)
class Group:
    """All ranks of one model, the leader first."""

    runtime_dir: Path
    name: str
    members: tuple[Member, ...]
    silent: Mapping[Place, WeightCacheError] = dataclasses.field(default_factory=dict)
    """Places with a socket whose daemon did not say what it is."""

    @property
    def leader(self) -> Member:
        return self.members[0]

    @property
    def where(self) -> str:
        return f"{self.runtime_dir}/{self.name}"

    @property
    def missing(self) -> list[str]:
        """The ranks that nobody answers for."""
        return [one.word for one in self.members if one.state is None]

    @property
    def coming(self) -> list[Member]:
        """The ranks that serve nothing yet, and will unless their load fails."""
        return [one for one, state in self.states() if state.current is None and state.state in _COMING]

    def require_whole(self) -> None:
        """Raises DaemonNotReady, DaemonUnreachable or DaemonAbsent with the ranks that are missing."""
        if not self.missing:
            return
        silent = "; ".join(f"{place}: {error.message}" for place, error in self.silent.items())
        alive = [str(place) for place, error in self.silent.items() if isinstance(error, NotReadyError)]
        steps = []
        if alive:
            steps.append(f"{', '.join(alive)}: alive but silent; is it stopped, starting or very busy?")
        if len(alive) < len(self.missing):
            steps.append(
                "start the daemons of the ranks that are gone" if alive else "start the daemons of these ranks"
            )
        error: type[WeightCacheError] = DaemonUnreachable if self.silent else DaemonAbsent
        raise (DaemonNotReady if len(alive) == len(self.missing) else error)(
            "not every rank of the group is there, and a change is for all or for none",
            expected=f"{len(self.members)} ranks",
            found=f"without {', '.join(self.missing)}" + (f" ({silent})" if silent else ""),
            where=self.where,
            next_step="; ".join(steps),
        )

    def states(self) -> list[tuple[Member, RankState]]:
        """Those that answered."""
        return [(one, one.state) for one in self.members if one.state is not None]


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
        """Raises InvalidOption for what is none of these."""
        if allowed is not None and not isinstance(allowed, AllowList):
            raise InvalidOption("unusable allowed", expected="an AllowList", found=shown(allowed))
        deadline = Deadline.after(checked_seconds("timeout_s", timeout_s))
        return cls(runtime_directory(runtime_dir), place_name(name), deadline, allowed or AllowList())

    async def group(self) -> Group:
        return await find_group(self.runtime_dir, self.name, deadline=self.deadline, allowed=self.allowed)


async def find_group(runtime_dir: Path, name: str, *, deadline: Deadline, allowed: AllowList) -> Group:
    """The group ``name``, whole or not, as far as its daemons answer.

    Raises DaemonAbsent where there is none; RanksDisagree where their ranks are not of one model, or one is there
    twice; DaemonUnreachable where no daemon of it answers.
    """
    places = places_with_socket(runtime_dir, name)
    if not places:
        raise nobody_there(runtime_dir, name)
    answers = await asyncio.gather(*(describe(place, deadline=deadline, allowed=allowed) for place in places))
    silent = {place: one for place, one in zip(places, answers, strict=True) if isinstance(one, WeightCacheError)}
    found = [(place, one) for place, one in zip(places, answers, strict=True) if isinstance(one, RankState)]
    if not found:
        raise next(iter(silent.values()))
    return Group(runtime_dir, name, members_of(found, f"{runtime_dir}/{name}"), silent)


async def describe(place: Place, *, deadline: Deadline, allowed: AllowList) -> RankState | WeightCacheError:
    """What the daemon of ``place`` says of itself, or why it does not."""
    deadline = deadline.within(ANSWER_S)
    try:
        return await ask(place, Describe(), RankState, deadline=deadline, patience_s=PATIENCE_S, allowed=allowed)
    except WeightCacheError as error:
        return error


def members_of(found: Sequence[tuple[Place, RankState]], where: str) -> tuple[Member, ...]:
    """All ranks of the sizes that were found, the leader first; those that were not found have no place. Raises
    RanksDisagree where they are not of one model, or one is there twice.
    """
    sizes = {tuple(getattr(state.rank, f"{kind}_size") for kind in KINDS) for _, state in found}
    if len(sizes) > 1:
        raise RanksDisagree(
            "the daemons of this name are not ranks of one model",
            expected="the same sizes at all",
            found="; ".join(f"{place}: {_sizes(state.rank)}" for place, state in found),
            where=where,
            next_step="release those that are left over, or give them another --name",
        )
    by_rank: dict[str, tuple[Place, RankState]] = {}
    for place, state in found:
        word = rank_word(_parallel(state.rank))
        if word in by_rank:
            raise RanksDisagree(
                "two daemons are the same rank",
                expected="each rank once",
                found=f"{word} at {by_rank[word][0]} and at {place}",
                where=where,
                next_step="release the one that is left over",
            )
        by_rank[word] = place, state
    words = [rank_word(one) for one in every_rank(dict(zip(KINDS, next(iter(sizes)), strict=True)))]
    return tuple(Member(word, *by_rank.get(word, (None, None))) for word in words)


def _parallel(rank: RankInfo) -> Parallel:
    return Parallel.model_validate(
        {f"{kind}_{what}": getattr(rank, f"{kind}_{what}") for kind in KINDS for what in ("rank", "size")}
    )


def _sizes(rank: RankInfo) -> str:
    return ", ".join(f"{kind} {getattr(rank, f'{kind}_size')}" for kind in KINDS)
