"""The benchmarks' words: settings, samples, tables, targets, outcomes. Data only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run was asked for. ``quick`` shakes everything out in little time; its numbers mean little."""

    quick: bool = False
    load_gib: float = 2.0
    asked_gib: float | None = None
    """What `--gib` said, if anything: for benchmarks whose own size is another."""
    rounds: int = 5
    settle: bool = True
    """Whether loads start with memory that the machine really has (`settle.py`)."""


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one thing, in seconds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        return min(self.seconds)

    @property
    def high(self) -> float:
        return max(self.seconds)


@dataclass(frozen=True)
class Table:
    """What people read. Cells are text already; ``notes`` say what the numbers are and are not."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """Something this project wants to reach, and what was found. ``met`` is None where it could not be measured."""

    text: str
    found: str
    met: bool | None


@dataclass(frozen=True)
class Outcome:
    """All that one benchmark has to say. ``figures`` are the raw numbers, JSON-like."""

    name: str
    tables: Sequence[Table]
    targets: Sequence[Target]
    figures: dict[str, Any] = field(default_factory=dict)


def milliseconds(seconds: float) -> str:
    """Three digits that matter."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def gigabytes_per_second(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e9 / seconds:.2f}"


def ratio(numerator: float, denominator: float) -> str:
    value = numerator / denominator
    return f"{value:.0f}" if value >= 20 else f"{value:.2f}"


def size(nbytes: float) -> str:
    """``1.5 GiB``, ``20 MiB``."""
    return f"{nbytes / GIB:.3g} GiB" if nbytes >= 0.09 * GIB else f"{nbytes / MIB:.3g} MiB"
