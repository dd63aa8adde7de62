"""(d) First touch of all pages after attach: time that a mapping saves at attach and takes when it is first used."""

from __future__ import annotations

import statistics
from typing import Any

from tests.benchmarks import checkpoints, fresh
from tests.benchmarks.daemon import serving
from tests.benchmarks.machine import require_memory
from tests.benchmarks.outcome import GIB, Outcome, Settings, Table, milliseconds, size
from tests.benchmarks.page_cache import make_warm
from tests.benchmarks.workspace import Workspace

_WORDS = {
    "first": "first touch, one read a page",
    "second": "second touch: what the reads themselves cost",
    "populate": "MADV_POPULATE_READ of the whole segment",
    "populated": "touch after that",
}


def run(settings: Settings, workspace: Workspace) -> Outcome:
    nbytes = GIB // 2 if settings.quick else 2 * GIB
    require_memory(2 * nbytes, what="touch")
    written = checkpoints.dense_decoder(workspace.directory / "touch", nbytes=nbytes, files=1)
    rounds = 2 if settings.quick else 7
    with serving(workspace, written.directory, name="touch") as daemon:
        ours = fresh.call(
            workspace,
            "measured.touching:after_attach",
            arguments=daemon.attach_arguments(written.directory),
            rounds=rounds,
        ).value
    make_warm(written.files)
    files = [str(path) for path in written.files]
    mapped = fresh.call(workspace, "measured.touching:mapped_file", files=files, rounds=rounds).value
    workspace.remove(written.directory)
    return Outcome("touch", [_table(ours, mapped, rounds)], (), {"ours": ours, "mapped_file": mapped})


def _table(ours: dict[str, Any], mapped: dict[str, Any], rounds: int) -> Table:
    rows = [
        (whose, _WORDS[way], milliseconds(statistics.median(seconds) * GIB / answer["nbytes"]))
        for whose, answer in (("weightcached", ours), ("safetensors, mapped file in the page cache", mapped))
        for way, seconds in answer["seconds"].items()
    ]
    return Table(
        f"First touch after attach: {size(ours['nbytes'])}, one thread (medians of {rounds})",
        ("", "what", "ms a GiB"),
        tuple(rows),
        ("attach maps and touches nothing; each round attaches anew in one process",),
    )
