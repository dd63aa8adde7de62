"""The chaos harness: a short run that nothing must break, and bugs planted in the keeper that it has to find."""

import itertools
import signal
import subprocess
import sys
from collections import Counter

import pytest

from tests.faults.chaos import invariants
from tests.faults.chaos.faults import Fault
from tests.faults.chaos.faults_changes import CHANGES, KilledInChange, KillWorkerInChange
from tests.faults.chaos.planted import BUGS, keeper
from tests.faults.chaos.report import render
from tests.faults.chaos.runner import ALL_FAULTS, Plan, run
from tests.faults.chaos.world import PAIR
from tests.support.unprivileged import ROOT


@pytest.mark.slow
def test_a_short_run_breaks_nothing() -> None:
    """As a command, with the digest cache on a small disk where that can be had; the long run is `make soak`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.chaos", "--seconds", "10", "--seed", "5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no invariant broken" in done.stdout


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within three times of one fault, and by the invariant that says what is wrong."""
    monkeypatch.setattr(invariants, "SETTLED_WITHIN_S", 3.0)
    planted = BUGS[bug]
    only, groups = [planted.fault], [planted.group]
    plan = Plan(seed=1, seconds=60, faults_max=3, only=only, groups=groups, keeper=keeper(bug), hostile=False)
    outcome = run(plan)
    assert outcome.broken is not None, render(outcome)
    assert outcome.broken.invariant == planted.invariant, render(outcome)


def test_without_a_bug_the_same_run_breaks_nothing() -> None:
    outcome = run(Plan(seed=1, seconds=60, faults_max=3, only=["KillKeeper"], groups=["one"], hostile=False))
    assert outcome.broken is None, render(outcome)
    assert outcome.figures.faults["KillKeeper"] == 3
    assert outcome.figures.attaches["daemon"] >= 2
    assert set(outcome.figures.attaches) == {"daemon"}


@pytest.mark.timeout(300)
def test_every_fault_of_changes_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once. Who is killed in a change is so at a step that takes its time: who comes too late strikes nothing."""
    monkeypatch.setattr(KilledInChange, "kinds", KillWorkerInChange.kinds)
    monkeypatch.setattr(KilledInChange, "steps", ("preparing",))
    only = [kind.name() for kind in CHANGES]
    plan = Plan(seed=2, seconds=240, faults_max=len(only), only=only, in_turn=True, groups=[PAIR], hostile=False)
    outcome = run(plan)
    assert outcome.broken is None, render(outcome)
    assert outcome.figures.faults == Counter(only), render(outcome)
    killing = Counter(kind.name() for kind in CHANGES if issubclass(kind, KilledInChange))
    assert outcome.figures.in_the_middle == killing, render(outcome)


def test_a_seed_decides_what_strikes_where() -> None:
    def steps(seed: int, *, small_disk: bool = True) -> list[tuple[type[Fault], str]]:
        steps = Plan(seed=seed, seconds=1).steps(["one", "two"], ["pair 0", "pair 1"], small_disk=small_disk)
        return list(itertools.islice(steps, 2000))

    assert steps(7) == steps(7)
    assert steps(7) != steps(8)
    assert {kind for kind, _ in steps(7)} == set(ALL_FAULTS)
    assert {place for kind, place in steps(7) if kind.at == "any"} == {"one", "two", "pair 0", "pair 1"}
    assert {place for kind, place in steps(7) if kind.at == "changing"} == {"pair 0", "pair 1"}
    assert not any(kind.needs_small_disk for kind, _ in steps(7, small_disk=False))


def test_a_run_that_is_told_to_stop_says_what_it_survived_and_leaves_nothing() -> None:
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.faults.chaos", "--seconds", "60"),
            *("--only", "PauseEngine", "--group", "one", "--no-hostile"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        if running.stdout is None:
            raise ValueError("a process that was started with pipes has them")
        first = next(line for line in running.stdout if "checked in" in line)
        running.terminate()
        said = running.stdout.read()
    assert "PauseEngine" in first
    assert running.returncode == 128 + signal.SIGTERM
    assert "stopped by signal 15" in said


def test_every_fault_has_a_name_and_a_weight() -> None:
    assert len({kind.name() for kind in ALL_FAULTS}) == len(ALL_FAULTS)
    assert all(kind.weight > 0 for kind in ALL_FAULTS)
