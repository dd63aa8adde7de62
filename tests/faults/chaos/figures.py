"""What a run has seen, counted: faults, attaches, times, checks. Owns numbers only."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Figures:
    """Times are seconds."""

    faults: Counter[str] = field(default_factory=Counter)
    fault_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    in_the_middle: Counter[str] = field(default_factory=Counter)
    """Of faults that kill somebody in a change: how often it was under way then."""
    attaches: Counter[str] = field(default_factory=Counter)
    attach_seconds: list[float] = field(default_factory=list)
    rows_compared: int = 0
    back_seconds: list[float] = field(default_factory=list)
    """From a keeper's death to its successor serving what it adopted."""
    adoption_seconds: dict[str, float] = field(default_factory=dict)
    """The same, as each keeper says that was there at the end of a step: from its own start."""
    lease_events: Counter[str] = field(default_factory=Counter)
    detached_seconds: list[float] = field(default_factory=list)
    noticed_seconds: list[float] = field(default_factory=list)
    """From a keeper being stopped (SIGSTOP) to an engine saying so."""
    changes: int = 0
    """That rank 0 has committed: updates, rollbacks, pushes."""
    swaps: int = 0
    barrier_seconds: list[float] = field(default_factory=list)
    not_swapped: Counter[str] = field(default_factory=Counter)
    """Attempts of engines to change over, by why they stayed with what they had."""
    steps: int = 0
    """That engines of groups computed, each looking at every rank."""
    checks: Counter[str] = field(default_factory=Counter)
    keeper_mib_max: float = 0.0
    supervisor_mib_max: float = 0.0
    engine_mib_max: float = 0.0
    generations: set[str] = field(default_factory=set)
