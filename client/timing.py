"""Owns where a start's time goes: stages by name, from the start of the process to the first answer.

No stage may be started inside another. Used by the engine's command; the demo reads the same numbers from ``--json``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


def process_age_s() -> float:
    """Seconds since the kernel started this process (its resolution is a clock tick, 10 ms)."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        after_name = file.read().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


class Stages:
    """Seconds by stage, in the order they ran, and notes to them. ``total_s`` counts from the process's start."""

    def __init__(self, *, already_s: float = 0.0) -> None:
        """``already_s``: seconds that had passed before this object was made; they become the stage ``python``."""
        self._started = time.monotonic() - already_s
        self.seconds: dict[str, float] = {"python": already_s} if already_s else {}
        self.notes: dict[str, str] = {}
        self.total_s = already_s

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the block to ``name``, whether it succeeds or raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.record(name, began_at_s=began, ended_at_s=time.monotonic())

    def record(self, name: str, *, began_at_s: float, ended_at_s: float) -> None:
        """Adds a span of the monotonic clock to ``name``; the total ends with it."""
        self.seconds[name] = self.seconds.get(name, 0.0) + ended_at_s - began_at_s
        self.total_s = ended_at_s - self._started

    def note(self, name: str, text: str) -> None:
        """Words that stand beside the stage in the table."""
        self.notes[name] = text

    def table(self) -> str:
        """Lines for people. What no stage covers is a line of its own, so that the lines add up to the total."""
        rows = dict(self.seconds)
        rows["between stages"] = max(0.0, self.total_s - sum(rows.values()))
        rows["total"] = self.total_s
        width = max(map(len, rows))
        lines = [f"{'stage':<{width}}  seconds"]
        for name, seconds in rows.items():
            lines.append(f"{name:<{width}}  {seconds:7.3f}  {self.notes.get(name, '')}".rstrip())
        return "\n".join(lines)

    def as_fields(self) -> dict[str, float]:
        """Stage → seconds with ``total``, rounded to microseconds, for JSON."""
        return {**{name: round(value, 6) for name, value in self.seconds.items()}, "total": round(self.total_s, 6)}
