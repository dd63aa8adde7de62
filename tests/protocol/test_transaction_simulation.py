"""No interleaving of failures leaves two ranks with different versions: every state is visited, and every rule is shown
to be needed.

The invariants (``simulation.py``): nothing undecided is granted; no change is both committed and aborted, nor acted
upon otherwise than it was decided; whatever rank 0 serves, every rank can give; one `update --resolve` ends what is
open or prepared, from every state. Where a vault is lost ranks may differ; an engine, new or running, compares what its
ranks were given, and never computes with two versions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from tests.protocol.simulation import CURRENT, Plan, Rank, Rules, Scenario, Simulation, Violation, held
from tests.support.unprivileged import ROOT
from weightcached.client.control import course as course_module
from weightcached.client.control.course import Answer, Course, Phase
from weightcached.protocol.transaction import Action, Decision, Ledger, Outcome, Prepared, action

UPDATE, OTHER, BACK, AGAIN = Plan("2"), Plan("3"), Plan("1", rollback=True), Plan("1", served=True)
PUSH = Plan("2", pushed=True)

SCENARIOS = {
    "an update, one that ends it, a vault lost": Scenario(2, {"T1": UPDATE}, ends=1, late=1, deaths=1, lost=(0, 1)),
    "two updates at once": Scenario(2, {"T1": UPDATE, "T2": OTHER}, ends=0, late=1, deaths=0),
    "an update and a rollback, an engine": Scenario(2, {"T1": UPDATE, "T2": BACK}, ends=0, late=1, deaths=1, engines=1),
    "an update, a rollback and one that resolves": Scenario(2, {"T1": UPDATE, "T2": BACK}, ends=1, late=0, deaths=0),
    "an update, a vault lost, an engine": Scenario(2, {"T1": UPDATE}, ends=1, late=1, deaths=0, lost=(0, 1), engines=1),
    "an update and a rollback, a vault lost": Scenario(
        2, {"T1": UPDATE, "T2": BACK}, ends=0, late=0, deaths=0, lost=(0, 1)
    ),
    "an update, and one to what is served": Scenario(2, {"T1": UPDATE, "T2": AGAIN}, ends=0, late=1, deaths=0),
    "an update to what is served, and one that resolves": Scenario(2, {"T1": AGAIN}, ends=1, late=1, deaths=1),
    "an update, one that resolves and one that gives it up": Scenario(
        2, {"T1": UPDATE}, ends=1, giving_up=1, late=0, deaths=1
    ),
    "a push that rank 0 may give up, and a rollback, an engine": Scenario(
        2, {"T1": PUSH, "T2": BACK}, ends=0, late=1, deaths=0, engines=1
    ),
    "three ranks, an update and a rollback": Scenario(3, {"T1": UPDATE, "T2": BACK}, ends=0, late=0, deaths=0),
    "three ranks, an update": Scenario(3, {"T1": UPDATE}, ends=0, late=1, deaths=1),
}
PAGE = (ROOT / "client/control/README.md").read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving_keeps_the_ranks_together(name: str) -> None:
    found = Simulation(SCENARIOS[name]).run()
    print(f"{name}: {found.states} states, {found.worlds} worlds")
    assert f"| {found.states:,} |" in PAGE, "the page says how many states were visited"


# What happens without each rule: a mutant, and the search finds it out.


def commit_of_what_the_leader_has_not(ledger: Ledger, transaction: str, _: Prepared | None) -> Ledger:
    decided = Decision(transaction, Outcome.COMMITTED, held("2").versions)
    return dataclasses.replace(ledger, open=None, committed=(*ledger.committed, decided))


def acting_upon(outcome: Outcome, what: Action) -> Rules:
    def mutant(prepared: Prepared, decision: Decision) -> Action:
        return what if decision.outcome is outcome else action(prepared, decision)

    return Rules(action=mutant)


def abort_after_commit(ledger: Ledger, transaction: str) -> Ledger:
    kept = tuple(one for one in ledger.committed if one.transaction != transaction)
    return dataclasses.replace(ledger, open=None, committed=kept, aborted=(*ledger.aborted, transaction))


def commit_after_abort(ledger: Ledger, transaction: str, prepared: Prepared | None) -> Ledger:
    kept = tuple(one for one in ledger.aborted if one != transaction)
    return dataclasses.replace(ledger, open=transaction, aborted=kept).commit(transaction, prepared)


def two_open_at_once(ledger: Ledger, transaction: str) -> Ledger:
    return dataclasses.replace(ledger, open=None).opened(transaction)


def no_condition(*_: object, **__: object) -> None:
    pass


def prepared_is_not_kept(rank: Rank) -> Rank:
    return dataclasses.replace(rank, change=None) if rank.change and rank.change.waits else rank


def decides_when_one_rank_is_ready(course: Course, answers: Mapping[int, Answer]) -> Course:
    after = course_module.after(course, answers)
    ready = after.phase is Phase.WAIT and any(one is not None for one in after.prepared)
    return dataclasses.replace(after, phase=Phase.COMMIT, may_commit=True) if ready else after


def decides_without_the_leader(course: Course, answers: Mapping[int, Answer]) -> Course:
    after = course_module.after(course, answers)
    ready = after.phase is Phase.WAIT and all(one is not None for one in after.prepared[1:])
    return dataclasses.replace(after, phase=Phase.COMMIT, may_commit=True) if ready else after


def takes_silence_for_readiness(course: Course, answers: Mapping[int, Answer]) -> Course:
    heard = {rank: answer for rank, answer in answers.items() if not isinstance(answer, course_module.Silence)}
    after = course_module.after(course, heard) if course.phase is Phase.WAIT else course_module.after(course, answers)
    silent = course.phase is Phase.WAIT and len(heard) < len(answers)
    return dataclasses.replace(after, phase=Phase.COMMIT, may_commit=True) if silent else after


def ends_without_writing(course: Course, answers: Mapping[int, Answer]) -> Course:
    after = course_module.after(course, answers)
    return dataclasses.replace(after, phase=Phase.APPLY) if after.phase is Phase.ABORT and not course.begins else after


def ends_by_committing(course: Course, answers: Mapping[int, Answer]) -> Course:
    after = course_module.after(course, answers)
    return dataclasses.replace(after, may_commit=True) if not after.begins and after.phase is Phase.READ else after


ALONE = Scenario(2, {"T1": UPDATE}, ends=1, late=1, deaths=1, lost=(0,))
TWO = Scenario(2, {"T1": UPDATE, "T2": OTHER}, ends=0, late=1, deaths=0)
PUSHED = Scenario(2, {"T1": PUSH}, ends=0, late=1, deaths=0)
ROLLED_BACK = Scenario(2, {"T1": UPDATE, "T2": BACK}, ends=0, late=1, deaths=0)

MUTANTS = {
    "rank 0 commits what it has not prepared": (
        Rules(commit=commit_of_what_the_leader_has_not, after=decides_without_the_leader),
        ALONE,
    ),
    "a rank switches when it has waited long enough": (acting_upon(Outcome.OPEN, Action.SWITCH), ALONE),
    "a rank drops when it has waited long enough": (acting_upon(Outcome.OPEN, Action.DROP), ALONE),
    "a rank takes unknown for aborted": (acting_upon(Outcome.UNKNOWN, Action.DROP), ALONE),
    "a rank takes unknown for committed": (acting_upon(Outcome.UNKNOWN, Action.SWITCH), ALONE),
    "a rank drops what is committed": (acting_upon(Outcome.COMMITTED, Action.DROP), ALONE),
    "a rank that waits for ever": (acting_upon(Outcome.ABORTED, Action.WAIT), ALONE),
    "a rank takes an earlier commit for the last": (acting_upon(Outcome.SUPERSEDED, Action.SWITCH), ROLLED_BACK),
    "an abort undoes a commit": (Rules(abort=abort_after_commit), ALONE),
    "rank 0 gives up a push that is committed": (Rules(give_up=abort_after_commit), PUSHED),
    "a commit undoes an abort": (Rules(commit=commit_after_abort), ALONE),
    "two changes are open at once": (Rules(opened=two_open_at_once, require_may_prepare=no_condition), TWO),
    "a rank prepares on top of anything": (Rules(require_may_prepare=no_condition), TWO),
    "what is prepared is lost with the keeper": (Rules(death=prepared_is_not_kept), ALONE),
    "a coordinator does not wait for all": (Rules(after=decides_when_one_rank_is_ready), ALONE),
    "a coordinator takes silence for readiness": (Rules(after=takes_silence_for_readiness), ALONE),
    "nobody writes the abort down": (Rules(after=ends_without_writing), ALONE),
    "what is open is committed, prepared or not": (
        Rules(after=ends_by_committing, commit=commit_of_what_the_leader_has_not),
        ALONE,
    ),
}


BESIDE = Scenario(2, {"T1": UPDATE}, ends=0, late=0, deaths=0, engines=1)

ENGINE_MUTANTS = {
    "an engine takes each rank's current and does not compare": (
        Rules(wants=lambda _: CURRENT, agree=lambda _: True),
        "a new engine computes with v2 and v1",
    ),
    "a running engine switches and does not compare": (
        Rules(agree=lambda _: True),
        "a running engine computes with v2 and v1",
    ),
    "a rank grants what is only prepared": (
        Rules(grants_prepared=lambda _: True),
        r"rank \d grants .*v2.*, which nobody decided",
    ),
}


@pytest.mark.parametrize("name", ENGINE_MUTANTS)
def test_without_a_rule_of_engines_the_search_finds_what_they_compute_with(name: str) -> None:
    rules, found = ENGINE_MUTANTS[name]
    with pytest.raises(Violation, match=f"^{found}"):
        Simulation(BESIDE, rules).run()


def test_an_engine_that_takes_each_ranks_current_and_compares_is_safe() -> None:
    """It is refused where ranks differ, instead of asking for what all of them can give."""
    Simulation(BESIDE, Rules(wants=lambda _: CURRENT)).run()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_without_a_rule_the_search_finds_a_violation(name: str) -> None:
    rules, scenario = MUTANTS[name]
    with pytest.raises(Violation):
        Simulation(scenario, rules).run()
