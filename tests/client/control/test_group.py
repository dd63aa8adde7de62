"""Which daemons are one group: all ranks of one model, each once; what is missing or does not belong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightcached.client.control.group import Group, members_of
from weightcached.client.control.held_commands import render
from weightcached.client.control.holding import held_by_all
from weightcached.protocol.control import RankInfo, RankState
from weightcached.protocol.errors import DaemonAbsent, DaemonNotReady, DaemonUnreachable, RanksDisagree
from weightcached.protocol.messages import GenerationInfo
from weightcached.protocol.places import Place

AT = Path("/run/weightcached")


def rank(device: str, **parallel: int) -> tuple[Place, RankState]:
    sizes: dict[str, Any] = {
        f"{kind}_{what}": int(what == "size") for kind in ("tp", "pp", "ep") for what in ("rank", "size")
    }
    info = RankInfo(place="live", **{**sizes, **parallel})
    state = RankState(
        rank=info,
        state="ready",
        vault_id="0" * 32,
        fingerprint=None,
        current=None,
        generations=(),
        change=None,
        open=None,
    )
    return Place(AT, "live", device), state


def test_the_leader_is_first_whatever_the_places_are_called() -> None:
    found = [rank("gpu-a", tp_rank=1, tp_size=2), rank("gpu-b", tp_rank=0, tp_size=2)]
    members = members_of(found, "there")
    assert [(one.word, one.place.device if one.place else None) for one in members] == [
        ("tp0of2", "gpu-b"),
        ("tp1of2", "gpu-a"),
    ]
    Group(AT, "live", members).require_whole()


def test_a_rank_that_is_missing_is_named_and_a_daemon_that_is_silent_too() -> None:
    members = members_of(
        [rank("a", tp_rank=0, tp_size=2, pp_size=2), rank("b", tp_rank=1, tp_size=2, pp_size=2)], "there"
    )
    with pytest.raises(DaemonAbsent, match="without tp0of2-pp1of2, tp1of2-pp1of2"):
        Group(AT, "live", members).require_whole()
    silent = {Place(AT, "live", "c"): DaemonUnreachable("nobody listens")}
    with pytest.raises(
        DaemonUnreachable, match=r"live/c: nobody listens\).*next step: start the daemons of these ranks$"
    ):
        Group(AT, "live", members, silent).require_whole()
    alive = {Place(AT, "live", "c"): DaemonNotReady("no answer in time", next_step="allow more time")}
    step = "live/c: alive but silent; is it stopped, starting or very busy\\?"
    with pytest.raises(DaemonUnreachable, match=rf"next step: {step}; start the daemons of the ranks that are gone$"):
        Group(AT, "live", members, alive).require_whole()
    both = {**alive, Place(AT, "live", "d"): DaemonNotReady("no answer in time")}
    with pytest.raises(DaemonNotReady, match=r"next step: live/c, live/d: alive but silent; [^;]*$"):
        Group(AT, "live", members, both).require_whole()


def test_generations_says_who_holds_nothing_and_why_a_daemon_is_silent() -> None:
    members = members_of([rank("a", tp_rank=0, tp_size=2)], "there")
    silent = {Place(AT, "live", "c"): DaemonUnreachable("nobody listens")}
    lines = render(Group(AT, "live", members, silent))
    assert lines[1:] == ["tp1of2: no daemon answers", "live/c: nobody listens", "tp0of2: ready, and holds no weights"]


def test_generations_says_what_a_version_was_called_before_its_digest_was_known() -> None:
    both = "digest:" + "a" * 64, "receipts:" + "b" * 64
    members = members_of([holding("a", 0, both, ("pushed:c", "pushed:c")), holding("b", 1, both)], "there")
    lines = [line for line in render(Group(AT, "live", members)) if "is also" in line]
    assert lines == [f"digest:{'a' * 12} is also receipts:{'b' * 12}"]


def test_daemons_of_other_sizes_and_a_rank_twice_are_no_group() -> None:
    with pytest.raises(RanksDisagree, match=r"live/a: tp 1.*live/b: tp 2"):
        members_of([rank("a"), rank("b", tp_size=2)], "there")
    with pytest.raises(RanksDisagree, match="tp0of2 at live/a and at live/b"):
        members_of([rank("a", tp_size=2), rank("b", tp_size=2)], "there")


def holding(device: str, tp_rank: int, *words: tuple[str, str]) -> tuple[Place, RankState]:
    """A rank that serves the first of these and keeps the others; each is (version, what stood in before)."""
    place, state = rank(device, tp_rank=tp_rank, tp_size=2)
    generations = tuple(
        GenerationInfo(
            generation=f"{16 * tp_rank + number:032x}",
            version=version,
            receipts_version=receipts_version,
            standing="previous" if number else "current",
            origin="/models/m",
            digest=None,
            resident_nbytes=1,
            leases=0,
            pinned=False,
            age_s=1.0,
        )
        for number, (version, receipts_version) in enumerate(words)
    )
    return place, state.model_copy(update={"generations": generations, "current": generations[0].generation})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("digest:a", "receipts:a"), ("receipts:a", "receipts:a")),
        (("receipts:a", "receipts:a"), ("digest:a", "receipts:a")),
        (("digest:a", "receipts:a"), ("digest:a", "receipts:elsewhere")),
    ],
    ids=["rank 1 has no digest yet", "rank 0 has none yet", "through another mount"],
)
def test_a_rollback_asks_every_rank_by_a_word_that_it_knows(first: tuple[str, str], second: tuple[str, str]) -> None:
    current = ("receipts:b", "receipts:b")
    members = members_of([holding("a", 0, current, first), holding("b", 1, current, second)], "there")
    group = Group(AT, "live", members)
    for to in (None, first[0]):
        source = held_by_all(group, to)
        assert {source.version, source.receipts_version} & set(first)
        assert {source.version, source.receipts_version} & set(second)
