"""(h) A trainer pushes a model into fused shards for two ranks; beside it, copies of its tensors into fresh memory.

Two real daemons take it, from the first tensor until both have all of it, digested. What is compared with makes no
digest: NumPy copies every tensor into a fresh memfd, by one thread and by two. Contenders take turns, each in a process
of its own.
"""

from __future__ import annotations

import statistics
from typing import Any

from tests.benchmarks import checkpoints, fresh
from tests.benchmarks.daemon import serving
from tests.benchmarks.machine import require_memory
from tests.benchmarks.outcome import GIB, Outcome, Settings, Table, Target, gigabytes_per_second, size
from tests.benchmarks.turns import Turns
from tests.benchmarks.workspace import Workspace

GOAL = 0.7
_OURS = "weightcached, pushed into fused shards for TP 2, digests included"
_COPIES = {"copy into fresh pages, 1 thread": 1, "copy into fresh pages, 2 threads": 2}
_WAYS = (_OURS, *_COPIES)


def run(settings: Settings, workspace: Workspace) -> Outcome:
    sizes = [GIB // 8] if settings.quick else [GIB, 4 * GIB]
    tables, targets, figures = [], [], {}
    for nbytes in sizes:
        require_memory(4 * nbytes, what="push")  # the trainer's, the page cache's, what is served, and what is made
        measured = _measure(nbytes, settings, workspace)
        figures[str(nbytes)] = measured
        tables.append(_table(nbytes, measured))
        targets.append(_target(nbytes, measured))
    return Outcome("push", tables, targets, figures)


def _measure(nbytes: int, settings: Settings, workspace: Workspace) -> dict[str, list[dict[str, Any]]]:
    name = f"push-{nbytes}"
    written = checkpoints.dense_decoder(workspace.directory / name, nbytes=nbytes, files=2)
    shared: dict[str, Any] = {"files": [str(file) for file in written.files], "settled": settings.settle}
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    with serving(workspace, written.directory, name=name, ranks=2) as daemon:
        place: dict[str, Any] = {"runtime_dir": str(daemon.runtime_dir), "name": name}
        for number in Turns(len(_WAYS), rounds=settings.rounds):
            way = _WAYS[number]
            answer = (
                fresh.call(workspace, "measured.pushing:push", **shared, **place)
                if way == _OURS
                else fresh.call(workspace, "measured.pushing:copy", **shared, threads=_COPIES[way])
            )
            found[way].append(answer.value)
    workspace.remove(written.directory)
    return found


def _median_s(measured: list[dict[str, Any]]) -> float:
    return statistics.median(one["seconds"] for one in measured)


def _table(nbytes: int, measured: dict[str, list[dict[str, Any]]]) -> Table:
    ours, *_ = measured.values()
    rows = tuple(
        (
            way,
            gigabytes_per_second(one[0]["nbytes"], _median_s(one)),
            f"{min(each['seconds'] for each in one):.2f}",
            f"{max(each['seconds'] for each in one):.2f}",
            f"{_median_s(one) / _median_s(ours):.2f}",
        )
        for way, one in measured.items()
    )
    return Table(
        f"A trainer's {size(nbytes)} of bf16, named as on disk, to both ranks",
        ("way", "GB/s (median)", "fastest s", "slowest s", "push = 1"),
        rows,
        (
            "the last column: how many times as long as the push",
            "beside the push, until both ranks served it (checked again, and decided by all): "
            f"{statistics.median(one['stages']['commit'] for one in measured[_OURS]):.2f} s",
        ),
    )


def _target(nbytes: int, measured: dict[str, list[dict[str, Any]]]) -> Target:
    ours, *copies = measured.values()
    best = min(_median_s(one) for one in copies)
    share = best / _median_s(ours)
    return Target(
        f"push of {size(nbytes)} into fused TP 2: at least {GOAL:g} of the faster plain copy into fresh pages",
        f"{share:.2f}",
        share >= GOAL,
    )
