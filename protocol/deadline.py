"""One deadline for a whole exchange: every wait in it asks how much is left, so many small waits cannot add up."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock, in seconds."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def within(self, seconds: float) -> Deadline:
        """The same, or ``seconds`` from now if that is earlier."""
        return min(self, Deadline.after(seconds), key=lambda one: one.at_s)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at_s
