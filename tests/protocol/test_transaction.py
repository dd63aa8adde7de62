"""The rules of a change, one by one; that they are enough is what the simulation shows."""

from __future__ import annotations

import pytest

from weightcached.protocol.errors import UpdateConflict
from weightcached.protocol.transaction import (
    ABORTED_MAX,
    COMMITTED_MAX,
    Action,
    Decision,
    Held,
    Ledger,
    Outcome,
    Prepared,
    Versions,
    action,
    require_may_prepare,
    same_on_all,
)

NEW = Held("g2", Versions("digest:2", "receipts:2"))
OLD = Held("g1", Versions("digest:1", "receipts:1"))


def committed(*transactions: str) -> Ledger:
    ledger = Ledger()
    for one in transactions:
        ledger = ledger.opened(one).commit(one, Prepared(one, NEW))
    return ledger


def test_one_change_is_open_at_a_time_and_may_be_opened_again() -> None:
    ledger = Ledger().opened("T1")
    assert ledger.opened("T1") is ledger
    with pytest.raises(UpdateConflict, match="T1"):
        ledger.opened("T2")


@pytest.mark.parametrize("prepared", [None, Prepared("T2", NEW)])
def test_nothing_is_committed_that_the_leader_has_not_prepared(prepared: Prepared | None) -> None:
    with pytest.raises(UpdateConflict):
        Ledger().opened("T1").commit("T1", prepared)


def test_the_first_decision_stands() -> None:
    ledger = committed("T1")
    assert ledger.commit("T1", None) is ledger
    with pytest.raises(UpdateConflict):
        ledger.abort("T1")
    given_up = Ledger().opened("T1").abort("T1")
    assert given_up.abort("T1") is given_up
    for what in (lambda: given_up.opened("T1"), lambda: given_up.commit("T1", Prepared("T1", NEW))):
        with pytest.raises(UpdateConflict):
            what()


def test_only_the_last_commit_is_switched_for() -> None:
    ledger = committed("T1", "T2")
    assert action(Prepared("T2", NEW), ledger.decision("T2")) is Action.SWITCH
    assert ledger.decision("T1").outcome is Outcome.SUPERSEDED
    assert action(Prepared("T1", NEW), ledger.decision("T1")) is Action.DROP
    assert ledger.commit("T1", None) is ledger, "asked again, it is committed still"
    with pytest.raises(UpdateConflict):
        ledger.abort("T1")


def test_what_is_forgotten_is_unknown_and_unknown_decides_nothing() -> None:
    names = [f"T{number}" for number in range(COMMITTED_MAX + 1)]
    ledger = committed(*names)
    assert ledger.decision("T0").outcome is Outcome.UNKNOWN
    assert ledger.decision("T1").outcome is Outcome.SUPERSEDED
    for number in range(ABORTED_MAX + 1):
        ledger = ledger.abort(f"A{number}")
    assert ledger.decision("A0").outcome is Outcome.UNKNOWN
    assert action(Prepared("A0", NEW), ledger.decision("A0")) is Action.WAIT
    assert action(Prepared("A1", NEW), ledger.decision("A1")) is Action.DROP
    assert action(Prepared("T9", NEW), Decision("T9", Outcome.OPEN)) is Action.WAIT


@pytest.mark.parametrize("versions", [None, OLD.versions])
def test_another_version_than_was_committed_is_not_used(versions: Versions | None) -> None:
    with pytest.raises(UpdateConflict, match="another version"):
        action(Prepared("T1", NEW), Decision("T1", Outcome.COMMITTED, versions))


def test_a_rank_prepares_one_change_on_top_of_what_was_seen() -> None:
    require_may_prepare("T1", base="g1", current=OLD, prepared=None)
    require_may_prepare("T1", base="g1", current=OLD, prepared=Prepared("T1", NEW))
    with pytest.raises(UpdateConflict, match="T1"):
        require_may_prepare("T2", base="g1", current=OLD, prepared=Prepared("T1", NEW))
    with pytest.raises(UpdateConflict, match="g0"):
        require_may_prepare("T1", base="g0", current=OLD, prepared=None)


def test_versions_are_the_same_on_either_side_of_a_digest() -> None:
    before = Held("a", Versions("receipts:2", "receipts:2"))
    elsewhere = Held("b", Versions("digest:2", "receipts:of another mount"))
    assert same_on_all([NEW, before])
    assert same_on_all([NEW, elsewhere])
    assert not same_on_all([NEW, before, elsewhere]), "two of which nothing says that they are the same"
    assert not same_on_all([NEW, OLD])
