"""How long things took, counted: histograms that a ``Report`` carries and metrics render.

Owns the bounds and the counting. Pure; used on the event loop.
"""

from __future__ import annotations

from bisect import bisect_left

from weightcached.protocol.messages import Durations

ATTACH_BOUNDS_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
"""From an engine whose receipts prove enough to one that waits for a load."""
LOAD_BOUNDS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class DurationCounts:
    """One histogram. ``bounds_s`` ascend."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        """It took so long, once more."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._total_s += seconds

    def message(self) -> Durations:
        """As it is now."""
        return Durations(bounds_s=self._bounds_s, counts=tuple(self._counts), total_s=self._total_s)
