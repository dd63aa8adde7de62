"""The keeper's states, as a table. Owns which state may follow which; pure. Only the keeper moves the machine.

``starting`` finds out what there is, ``adopting`` checks what a vault handed back, ``loading`` fills memory (and waits
between attempts), ``ready`` serves, ``updating`` serves as ``ready`` does while other weights are made beside those
that are served, ``failed`` answers with the reason, ``draining`` refuses and ends what is under way, ``stopped`` is the
end. A move that the table does not have is a bug, and ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    STARTING = "starting"
    ADOPTING = "adopting"
    LOADING = "loading"
    READY = "ready"
    UPDATING = "updating"
    FAILED = "failed"
    DRAINING = "draining"
    STOPPED = "stopped"


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.STARTING: frozenset({State.ADOPTING, State.LOADING, State.FAILED, State.DRAINING}),
        State.ADOPTING: frozenset({State.READY, State.LOADING, State.FAILED, State.DRAINING}),
        State.LOADING: frozenset({State.READY, State.FAILED, State.DRAINING}),
        State.READY: frozenset({State.UPDATING, State.DRAINING}),
        State.UPDATING: frozenset({State.READY, State.DRAINING}),
        State.FAILED: frozenset({State.DRAINING}),
        State.DRAINING: frozenset({State.STOPPED}),
        State.STOPPED: frozenset(),
    }
)

SERVING = frozenset({State.READY, State.UPDATING})
"""In which engines are granted weights."""


class IllegalTransition(RuntimeError):
    """A move that the table does not have: a bug. The state is what it was; whoever sees this ends the process."""


class StateMachine:
    """Holds the state. ``on_change(new)`` is called after each move."""

    def __init__(self, on_change: Callable[[State], None]) -> None:
        self._state = State.STARTING
        self._on_change = on_change

    @property
    def state(self) -> State:
        return self._state

    def move(self, to: State) -> None:
        """Move along the table, or raise IllegalTransition."""
        if to not in TRANSITIONS[self._state]:
            raise IllegalTransition(f"{self._state} → {to} is not in the table")
        self._state = to
        self._on_change(to)
