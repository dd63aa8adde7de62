"""Turns within one process: contenders are measured round robin, so that a slow minute of the machine hits them all."""

from __future__ import annotations

import time
from collections.abc import Iterator


class Turns:
    """Iterating gives the number of whose turn it is; each round begins with another one. `add` keeps a measurement.

    Ends after ``rounds`` rounds, or after the round in which ``budget_s`` is used up, but not before three rounds.
    """

    def __init__(self, contenders: int, *, rounds: int, budget_s: float = float("inf")) -> None:
        self._contenders = contenders
        self._rounds = rounds
        self._budget_s = budget_s
        self.seconds: list[list[float]] = [[] for _ in range(contenders)]

    def __iter__(self) -> Iterator[int]:
        began_s = time.monotonic()
        for turn in range(self._rounds):
            if turn >= 3 and time.monotonic() - began_s > self._budget_s:
                return
            for step in range(self._contenders):
                yield (turn + step) % self._contenders

    def add(self, contender: int, seconds: float) -> None:
        self.seconds[contender].append(seconds)
