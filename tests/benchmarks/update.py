"""(h) An update while an engine generates: what of its tokens a second it loses until the new weights are there."""

from __future__ import annotations

import statistics
from typing import Any

from tests.benchmarks import checkpoints, fresh
from tests.benchmarks.daemon import serving
from tests.benchmarks.machine import require_memory
from tests.benchmarks.outcome import GIB, Outcome, Settings, Table, Target, size
from tests.benchmarks.workspace import Workspace

GOAL = 0.9
"""Of the tokens a second that there are without an update."""


def run(settings: Settings, workspace: Workspace) -> Outcome:
    nbytes = GIB // 4 if settings.quick else round(settings.load_gib * GIB)
    rounds = 1 if settings.quick else settings.rounds
    require_memory(4 * nbytes, what="update")
    written = [checkpoints.dense_decoder(workspace.directory / f"update-{n}", nbytes=nbytes, files=2) for n in (1, 2)]
    measured: list[dict[str, Any]] = []
    with serving(workspace, written[0].directory, name="update") as daemon:
        for number in range(rounds):
            now, newer = written[number % 2].directory, written[1 - number % 2].directory
            measured.append(
                fresh.call(
                    workspace,
                    "measured.updating:tokens_meanwhile",
                    model=str(now),
                    newer=str(newer),
                    runtime_dir=str(daemon.runtime_dir),
                    name=daemon.name,
                    alone_s=3.0 if settings.quick else 10.0,
                ).value
            )
    kept = statistics.median(_kept(one) for one in measured)
    target = Target(
        f"tokens a second while an update of {size(nbytes)} is loaded and verified: at least {GOAL:g} of those without",
        f"{kept:.2f}",
        kept >= GOAL,
    )
    rows = tuple(
        (*(f"{one[when]:.2f}" for when in ("before", "during", "after")), f"{_kept(one):.2f}", f"{one['update_s']:.1f}")
        for one in measured
    )
    table = Table(
        f"Greedy decoding in Transformers on mapped weights of {size(nbytes)}, while its daemon loads as much beside",
        ("tokens/s before", "during", "after", "share kept", "the update took (s)"),
        rows,
        ("loading and verifying step back behind everybody else (nice 15): an update takes longer",),
    )
    return Outcome("update", [table], (target,), {"rounds": measured})


def _kept(one: dict[str, Any]) -> float:
    return one["during"] / statistics.mean((one["before"], one["after"]))
