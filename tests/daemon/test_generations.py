"""Which generations are granted, in which order they are freed, and which never are: the value that says so."""

import pytest

from tests.support.generations import generation, published
from weightcached.daemon.generations import Generations, Published

A, B, C, D = (letter * 32 for letter in "abcd")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("weightcached.daemon.generations.time.monotonic", lambda: now[0])
    return now


def holding(*ids: str, keep: int = 1) -> Generations:
    """Those were served one after the other; the last is current."""
    held = Generations(keep=keep, grace_s=60.0)
    for id_ in ids:
        held.add(published(generation(id=id_, receipts_version=f"receipts:{id_}")))
        held.make_current(id_)
    return held


def ids(held: list[Published]) -> list[str]:
    return [one.generation.id for one in held]


def test_what_is_prepared_is_granted_to_nobody() -> None:
    held = holding(A, B)
    held.add(published(generation(id=C, receipts_version="receipts:c"), staged=True))
    held.prepared = C
    assert ids(held.granted) == [B, A]
    assert ids(held.all) == [B, A, C]
    assert [held.standing(id_) for id_ in (A, B, C)] == ["previous", "current", "prepared"]
    assert held.served(C) is None
    assert held.of_version("receipts:c") is None
    assert held.to_free(()) == held.spare((C,))[1:] == []
    held.prepared = None
    held.make_current(C)
    assert ids(held.granted) == [C, B, A]
    assert held.of_version("receipts:c") is held.current


def test_a_rollback_makes_the_one_before_the_newest() -> None:
    held = holding(A, B)
    held.prepared = A
    assert (held.standing(A), held.to_free(())) == ("previous", []), "and until it is decided it is what it was"
    held.prepared = None
    held.make_current(A)
    assert ids(held.granted) == [A, B]
    assert ids(held.previous) == [B]


@pytest.mark.parametrize(
    ("keep", "leased", "pinned", "freed"),
    [
        (0, (), (), [A, B, C]),
        (1, (), (), [A, B]),
        (2, (), (), [A]),
        (3, (), (), []),
        (1, (A,), (), [B]),
        (1, (), (B,), [A]),
        (0, (A,), (C,), [B]),
        (0, (D,), (D,), [A, B, C]),
    ],
)
def test_what_nothing_holds_is_freed_the_oldest_first(
    keep: int, leased: tuple[str, ...], pinned: tuple[str, ...], freed: list[str]
) -> None:
    held = holding(A, B, C, D, keep=keep)
    held.pins.update(pinned)
    assert held.to_free(leased) == freed


def test_room_is_made_of_what_is_merely_kept_for_rollback() -> None:
    held = holding(A, B, C, D, keep=3)
    held.prepared = A  # on its way back
    held.pins.add(B)
    assert held.spare(()) == [C]
    assert held.spare((C,)) == []


def test_a_grace_pins_until_it_is_over(clock: list[float]) -> None:
    held = holding(A, B, keep=0)
    held.give_grace(A)
    assert held.is_pinned(A)
    assert held.to_free(()) == []
    assert held.next_end_of_grace_s() == 60.0
    clock[0] += 59.0
    assert held.pinned_for_s(A) == 1.0
    clock[0] += 1.0
    assert held.next_end_of_grace_s() is None
    assert held.to_free(()) == [A]


def test_a_pin_is_of_a_version_and_goes_to_its_newest_generation() -> None:
    held = holding(A, B, C, keep=0)
    held.pins.update((A, B))
    held.add(published(generation(id=D, receipts_version=f"receipts:{A}"), staged=True))
    assert held.outdated_pins() == {}, "what was never served may yet be given up"
    held.make_current(D)
    assert held.outdated_pins() == {A: D}


def test_what_is_removed_is_pinned_and_granted_no_more(clock: list[float]) -> None:
    held = holding(A, B)
    held.pins.add(A)
    held.give_grace(A)
    assert held.remove(A) is not None
    assert held.remove(A) is None
    assert (ids(held.all), held.pins, held.next_end_of_grace_s()) == ([B], set(), None)
    assert held.learn(A, unproven="late") is None
