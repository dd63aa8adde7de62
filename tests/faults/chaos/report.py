"""What a run survived, as text. Owns the rendering."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from tests.faults.chaos.runner import Outcome


def render(outcome: Outcome) -> str:
    """Tables of what was seen; when something is broken, what, when, and everything that led there."""
    return "\n".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterable[str]:
    figures = outcome.figures
    total = figures.faults.total()
    each_s = outcome.seconds / max(total, 1)
    yield f"seed {outcome.seed}: {total} faults in {outcome.seconds:.0f} s ({each_s:.2f} s each)"
    yield ""
    yield f"{'fault':28} {'times':>6} {'mean s':>8}"
    for name, count in figures.faults.most_common():
        yield f"{name:28} {count:6} {figures.fault_seconds[name] / count:8.2f}"
    yield ""
    yield f"{'attaches by outcome':28} {'times':>6}"
    for name, count in figures.attaches.most_common():
        yield f"{name:28} {count:6}"
    yield ""
    yield from _times("attach", figures.attach_seconds)
    yield from _times("keeper killed to serving again", figures.back_seconds)
    yield from _times("adoption (keeper's start to ready)", list(figures.adoption_seconds.values()))
    yield from _times("lease detached", figures.detached_seconds)
    yield from _times("stopped keeper noticed", figures.noticed_seconds)
    yield f"changes committed: {figures.changes}; hot swaps of all ranks by engines: {figures.swaps}"
    yield from _times("hot swap of all ranks (barrier)", figures.barrier_seconds)
    yield f"engines' attempts to change over that left them with what they had: {_words(figures.not_swapped.items())}"
    yield f"steps of engines that looked at every rank: {figures.steps}"
    yield f"killed while a change was under way: {_words(figures.in_the_middle.items())}"
    yield f"lease events: {_words(figures.lease_events.items())}"
    yield f"generations seen: {len(figures.generations)}; parameters re-hashed by engines: {figures.rows_compared}"
    keeper_mib, supervisor_mib = figures.keeper_mib_max, figures.supervisor_mib_max
    yield f"own memory, largest: keeper {keeper_mib:.1f} MiB, supervisor {supervisor_mib:.1f} MiB"
    yield f"engines' own memory, largest: {figures.engine_mib_max:.1f} MiB"
    yield f"checks: {_words(figures.checks.items())}"
    if outcome.stopped is not None:
        yield f"stopped by signal {outcome.stopped.signum} before its time; no invariant broken until then"
        return
    if outcome.broken is None:
        yield "no invariant broken"
        return
    yield outcome.logs
    yield "history: " + "; ".join(outcome.history[-40:])
    yield f"BROKEN at step {len(outcome.history)} of seed {outcome.seed}: {outcome.broken}"


def _times(what: str, seconds: Sequence[float]) -> Iterable[str]:
    if seconds:
        middle, most = statistics.median(seconds), max(seconds)
        yield f"{what}: median {middle:.3f} s, longest {most:.3f} s, {len(seconds)} times"


def _words(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts) or "none"
