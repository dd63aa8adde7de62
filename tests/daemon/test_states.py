"""The state table, exhaustively: every pair of states either is in the table or is refused and changes nothing."""

from itertools import product

import pytest

from weightcached.daemon.states import TRANSITIONS, IllegalTransition, State, StateMachine

# Written out again, by hand: the test is the second opinion.
LEGAL = {
    ("starting", "adopting"),
    ("starting", "loading"),
    ("starting", "failed"),
    ("starting", "draining"),
    ("adopting", "ready"),
    ("adopting", "loading"),
    ("adopting", "failed"),
    ("adopting", "draining"),
    ("loading", "ready"),
    ("loading", "failed"),
    ("loading", "draining"),
    ("ready", "updating"),
    ("ready", "draining"),
    ("updating", "ready"),
    ("updating", "draining"),
    ("failed", "draining"),
    ("draining", "stopped"),
}
ROUTES = {
    "starting": [],
    "adopting": ["adopting"],
    "loading": ["loading"],
    "ready": ["loading", "ready"],
    "updating": ["loading", "ready", "updating"],
    "failed": ["failed"],
    "draining": ["draining"],
    "stopped": ["draining", "stopped"],
}


def machine_in(state: str) -> tuple[StateMachine, list[State]]:
    seen: list[State] = []
    machine = StateMachine(seen.append)
    for step in ROUTES[state]:
        machine.move(State(step))
    seen.clear()
    return machine, seen


def test_the_table_has_every_state_and_no_other() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {(before.value, after.value) for before, afters in TRANSITIONS.items() for after in afters} == LEGAL


@pytest.mark.parametrize(("before", "after"), list(product(ROUTES, ROUTES)))
def test_a_move_is_made_or_refused(before: str, after: str) -> None:
    machine, seen = machine_in(before)
    assert machine.state == before
    if (before, after) in LEGAL:
        machine.move(State(after))
        assert machine.state == after
        assert seen == [after]
    else:
        with pytest.raises(IllegalTransition, match=f"{before} → {after}"):
            machine.move(State(after))
        assert machine.state == before
        assert seen == []


def test_every_state_can_end() -> None:
    for state in ROUTES:
        machine, _ = machine_in(state)
        if machine.state not in (State.DRAINING, State.STOPPED):
            machine.move(State.DRAINING)
        if machine.state != State.STOPPED:
            machine.move(State.STOPPED)
        assert machine.state == State.STOPPED
