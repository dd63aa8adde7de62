"""How long to pause before trying to reach a daemon again. Owns the arithmetic; looks at no clock, never sleeps."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_S = 0.05
LONGEST_S = 2.0
_SHORTEST_PART = 0.5


class Backoff:
    """0.05 s, doubling to 2 s, each shortened by up to a half at random: the engines of a host lost their daemon in
    the same instant, and should not come back to it in the same instant.
    """

    def __init__(self, *, part: Callable[[], float] | None = None) -> None:
        """``part`` says which part of each pause to take, 0 to 1; at random unless told otherwise."""
        self._part = part or (lambda: random.uniform(_SHORTEST_PART, 1))  # noqa: S311  # protects nothing
        self._next_s = FIRST_S

    def next_s(self) -> float:
        """The next pause in seconds."""
        pause_s = self._next_s * self._part()
        self._next_s = min(2 * self._next_s, LONGEST_S)
        return pause_s
