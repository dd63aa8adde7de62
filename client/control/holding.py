"""What the ranks of a group hold: which generations a word means, and keeping or freeing them.

Changes nothing of what is served. Coroutines; ``weightcached.client.control`` has the blocking ones.
"""

from __future__ import annotations

from weightcached.client.control.coordinator import held
from weightcached.client.control.group import Group, Member, Where
from weightcached.client.options import checked_flags, checked_text
from weightcached.protocol.control import Drop, FromHeld, Pin, RankState
from weightcached.protocol.control_channel import ask
from weightcached.protocol.errors import GenerationGone, WeightCacheError
from weightcached.protocol.messages import GenerationInfo
from weightcached.protocol.transaction import Versions


def held_by_all(group: Group, to: str | None) -> FromHeld:
    """The version that is meant, as rank 0 knows it. Raises GenerationGone unless every rank can serve it."""
    states = group.states()
    leading = [one for one in states[0][1].generations if one.standing != "prepared"]
    if to is None:
        current = next((one for one in leading if one.standing == "current"), None)
        earlier = [one for one in leading if one.standing == "previous" and not (current and _is(one, current))]
        if not earlier:
            raise GenerationGone(
                "there is nothing to roll back to",
                expected="another version, served before",
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
    return FromHeld(version=wanted.version, receipts_version=wanted.receipts_version)


def _is(one: GenerationInfo, other: GenerationInfo) -> bool:
    return one.standing != "prepared" and held(one).versions.same(held(other).versions)


def _one(infos: list[GenerationInfo], word: str, group: Group) -> GenerationInfo:
    """The one generation or version that ``word`` is, or is the beginning of."""
    found = [one for one in infos if _matches(one, word)]
    if not found:
        known = ", ".join(dict.fromkeys(one.version for one in infos)) or "none"
        raise GenerationGone(
            "no such version or generation is held",
            expected=word,
            found=known,
            where=group.where,
            next_step="`weightcached generations` shows what is",
        )
    first = found[0]
    if any(not held(first).versions.same(Versions(one.version, one.receipts_version)) for one in found):
        several = ", ".join(dict.fromkeys(one.version for one in found))
        raise GenerationGone(
            "several versions begin so",
            expected=word,
            found=several,
            where=group.where,
            next_step="give more of the one that is meant",
        )
    return first


def _matches(one: GenerationInfo, word: str) -> bool:
    if not word:
        return False
    words = (one.generation, one.version, one.receipts_version)
    return any(known.startswith(word) or known.partition(":")[2].startswith(word) for known in words)


async def pin(where: Where, word: str, *, pinned: bool = True) -> Group:
    """Keep a version, every rank's generation of it, whatever would have it freed, or no longer. ``word``: the version,
    one of these generations, or its beginning. The group afterwards.
    """
    checked_text("version or generation", word)
    checked_flags(pinned=pinned)
    group = await where.group()
    for member, one in _where_held(group, word):
        await _ask(where, member, Pin(generation=one.generation, pinned=pinned))
    return await where.group()


async def drop(where: Where, word: str, *, force: bool = False) -> Group:
    """Free a version, every rank's generation of it, that is neither served nor part of a change. ``force``: also one
    that is pinned or leased. ``word`` as in :func:`pin`. The group afterwards. Where one rank is seen to need it,
    nothing is asked of those that do not.
    """
    checked_text("version or generation", word)
    checked_flags(force=force)
    group = await where.group()
    meant = _where_held(group, word)
    for member, one in sorted(meant, key=lambda each: not _is_needed(*each, force=force)):  # whoever refuses, first
        await _ask(where, member, Drop(generation=one.generation, force=force))
    return await where.group()


async def _ask(where: Where, member: Member, request: Pin | Drop) -> RankState:
    """The rank's answer. Raises what it refuses with, which says that it was this rank."""
    place = member.place
    if place is None:
        raise ValueError(f"{member.word} holds nothing: nobody answers for it")
    try:
        return await ask(place, request, RankState, deadline=where.deadline, allowed=where.allowed)
    except WeightCacheError as error:
        error.where = f"{member.word} at {error.where or place.socket_path}"
        raise


def _is_needed(member: Member, one: GenerationInfo, *, force: bool) -> bool:
    """Whether that rank will refuse to free it, as far as it was seen."""
    change = member.state.change if member.state is not None else None
    waits = change is not None and (change.generation, change.state) == (one.generation, "prepared")
    return waits or one.standing != "previous" or (not force and (one.pinned or one.leases > 0))


def _where_held(group: Group, word: str) -> list[tuple[Member, GenerationInfo]]:
    """The generations that ``word`` means: those of one version, at all ranks that hold it. Of a rank that holds it
    twice, all where the version is named; where a generation is, that one, and elsewhere those of its standing.
    """
    states = group.states()
    meant = _one([one for _, state in states for one in state.generations], word, group)
    found: list[tuple[Member, GenerationInfo]] = []
    for member, state in states:
        shares = [one for one in state.generations if held(one).versions.same(held(meant).versions)]
        if meant.generation.startswith(word):
            named = [one for one in shares if one.generation == meant.generation]
            shares = named or [one for one in shares if one.standing == meant.standing] or shares
        found += [(member, one) for one in shares]
    return found
