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
    wanted = int((settings.asked_gib or (1 if settings.quick else 8)) * GIB)
    available = meminfo_nbytes("MemAvailable")
    large = wanted if available >= _needed_nbytes(wanted) + SPARE_BYTES else wanted // 2
    require_memory(_needed_nbytes(large), what="swap")
    halved = (
        f"{size(large)} and not {size(wanted)}, two of which need {size(_needed_nbytes(wanted) + SPARE_BYTES)} of free "
        f"memory: there are {size(available)}"
        if large < wanted
        else None
    )
    rounds = 4 if settings.quick else 4 * settings.rounds
    measured: dict[int, dict[str, Any]] = {}
    for nbytes in sorted({min(GIB // 10, large), large}):
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
    barriers = [seconds["barrier"] for ways in measured.values() for seconds in ways.values()]
    median_s = max(map(statistics.median, barriers))
    target = Target(
        f"swap of {TENSORS} tensors, barrier entered to barrier left: at most {GOAL_S * 1e3:g} ms (median), "
        + " and ".join(map(size, measured))
        + (f" ({halved})" if halved else ""),
        f"{milliseconds(median_s)} ms, the longest {milliseconds(max(map(max, barriers)))} ms",
        median_s <= GOAL_S,
    )
    table = _table(measured, rounds, halved)
    return Outcome("swap", [table], (target,), {str(key): value for key, value in measured.items()})


def _needed_nbytes(nbytes: int) -> int:
    """Two generations, and what is beside them."""
    return 2 * nbytes + SPARE_BYTES


def _table(measured: dict[int, dict[str, Any]], rounds: int, halved: str | None) -> Table:
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
            *([halved] if halved else []),
        ),
    )
