"""(f) Hot swap: how long nobody may compute while one generation takes the place of another, and what comes before."""

from __future__ import annotations

import statistics
from typing import Any

from tests.benchmarks import fresh
from tests.benchmarks.machine import SPARE_BYTES, meminfo_nbytes, require_memory
from tests.benchmarks.outcome import GIB, Outcome, Settings, Table, Target, milliseconds, size
from tests.benchmarks.workspace import Workspace

GOAL_S = 0.010
TENSORS = 1000


def run(settings: Settings, workspace: Workspace) -> Outcome:
    large = GIB if settings.quick else 8 * GIB
    if meminfo_nbytes("MemAvailable") < 2 * large + 2 * SPARE_BYTES:
        large //= 2
    require_memory(2 * large + SPARE_BYTES, what="swap")
    rounds = 4 if settings.quick else 4 * settings.rounds
    measured: dict[int, dict[str, Any]] = {}
    for nbytes in (GIB // 10, large):
        folder = workspace.runtime_dir / f"swap-{nbytes}"
        folder.mkdir(mode=0o755)
        measured[nbytes] = fresh.call(
            workspace,
            "measured.swapping:swaps",
            folder=str(folder),
            nbytes=nbytes,
            tensors=TENSORS,
            rounds=rounds,
        ).value
    worst_s = max(statistics.median(seconds["barrier"]) for ways in measured.values() for seconds in ways.values())
    target = Target(
        f"swap of {TENSORS} tensors, barrier entered to barrier left: at most {GOAL_S * 1e3:g} ms (median), "
        f"{size(GIB // 10)} and {size(large)}",
        f"{milliseconds(worst_s)} ms",
        worst_s <= GOAL_S,
    )
    return Outcome("swap", [_table(measured, rounds)], (target,), {str(key): value for key, value in measured.items()})


def _table(measured: dict[int, dict[str, Any]], rounds: int) -> Table:
    words = {"quiet": "nobody reads", "busy": "two threads read"}
    rows = tuple(
        (
            size(nbytes),
            words[way],
            milliseconds(statistics.median(seconds["populate"])),
            milliseconds(statistics.median(seconds["waited"])),
            milliseconds(statistics.median(seconds["barrier"])),
            milliseconds(max(seconds["barrier"])),
            milliseconds(statistics.median(seconds["processor"])),
        )
        for nbytes, ways in measured.items()
        for way, seconds in ways.items()
    )
    return Table(
        f"Hot swap of {TENSORS} tensors (ms, medians of {rounds})",
        ("size", "", "map and populate, aside", "wait for readers", "barrier", "longest", "of it processor"),
        rows,
        (
            "barrier: from the moment when nobody is inside until readers go on; the old is unmapped after it",
            "of it processor: what the thread that swaps computed; the rest it waited for a busy machine",
        ),
    )
