"""(e) Shards: one rank of four beside loaders that slice too; quantizing while loading; loading a finished snapshot.

Contenders take turns, each load in a process of its own, as in `load.py`. Every one that makes the rank's parameters
proves by their digests that they are the same.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks import checkpoints, fresh
from tests.benchmarks.load import STATES, State, prepare
from tests.benchmarks.machine import require_memory
from tests.benchmarks.outcome import GIB, Outcome, Settings, Table, Target, gigabytes_per_second, size
from tests.benchmarks.report import say
from tests.benchmarks.turns import Turns
from tests.benchmarks.workspace import Workspace

SIZE, RANK = 4, 1
OURS, WHOLE, SNAPSHOT = (
    f"weightcached, rank {RANK} of {SIZE}",
    "weightcached, whole",
    "weightcached, from a snapshot",
)
LARGE_COPY = "plain copy of the snapshot to a segment, pages of 2 MiB"
COPIES = {
    "plain copy of the snapshot to a segment": "segment_sendfile",
    "plain copy of the snapshot to private memory": "private_pread",
}
"""Into pages as the kernel gives them: the limit, as in `load.py`."""


@dataclass(frozen=True)
class Contender:
    """One way to make a shard, with a ``package`` that has to be installed, from ``files`` if not the checkpoint's."""

    name: str
    function: str
    arguments: Mapping[str, Any]
    package: str | None = None
    files: tuple[Path, ...] = ()
    rival: bool = False
    """Whether it makes the same rank as we do."""


@dataclass
class Loads:
    """What one contender did in one state of the page cache."""

    contender: Contender
    state: State
    seconds: list[float] = field(default_factory=list)
    nbytes: int = 0
    digests: Mapping[str, str] | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def run(settings: Settings, workspace: Workspace) -> Outcome:
    nbytes = int(settings.load_gib * GIB)
    require_memory(4 * nbytes, what="shards")  # checkpoint and snapshot in the page cache, a copy, and buffers
    written = checkpoints.dense_decoder(workspace.directory / "shards", nbytes=nbytes, files=max(2, nbytes // GIB))
    to = workspace.directory / "snapshot"
    answer = fresh.call(workspace, "loading.ours:write_a_snapshot", directory=str(written.directory), to=str(to)).value
    contenders = _contenders(written.directory, written.files, to, tuple(map(Path, answer["files"])))
    chosen = [one for one in contenders if one.package is None or importlib.util.find_spec(one.package) is not None]
    loads = [one for state in STATES for one in _measure(state, chosen, settings, workspace, written.files)]
    return Outcome(
        "shards", [_table(loads, nbytes)], list(_targets(loads)), {"loads": [_figures(one) for one in loads]}
    )


def _figures(one: Loads) -> dict[str, Any]:
    return {"name": one.contender.name, "state": one.state, "seconds": one.seconds, "nbytes": one.nbytes}


def _contenders(
    directory: Path, files: Sequence[Path], snapshot: Path, segments: tuple[Path, ...]
) -> tuple[Contender, ...]:
    model = {"directory": str(directory), "files": [str(path) for path in files]}
    rank = {**model, "size": SIZE, "rank": RANK}
    copied = {"files": [str(path) for path in segments], "sample": (0, 0, 4096), "threads": 2, "directory": ""}
    return (
        Contender(OURS, "loading.ours:one_rank", rank, rival=True),
        Contender("safetensors get_slice", "loading.one_rank:safetensors_slices", rank, "safetensors", rival=True),
        Contender("safetensors, sliced views", "loading.one_rank:safetensors_tensors", rank, "safetensors", rival=True),
        Contender(
            "runai-model-streamer, sliced", "loading.one_rank:runai_streamer", rank, "runai_model_streamer", rival=True
        ),
        Contender(WHOLE, "loading.ours:one_rank", model),
        *(
            Contender(f"{WHOLE}, {method}", "loading.ours:one_rank", {**model, "quantization": method})
            for method in ("fp8", "fp8-tensor", "fp8-block", "int8", "int4")
        ),
        Contender(SNAPSHOT, "loading.ours:from_a_snapshot", {"directory": str(snapshot)}, files=segments),
        Contender(LARGE_COPY, "loading.plain_copies:segment_huge_pread", copied, files=segments),
        *(
            Contender(name, f"loading.plain_copies:{function}", copied, files=segments)
            for name, function in COPIES.items()
        ),
    )


def _measure(
    state: State, contenders: Sequence[Contender], settings: Settings, workspace: Workspace, files: Sequence[Path]
) -> list[Loads]:
    loads = [Loads(one, state) for one in contenders]
    turns = Turns(len(loads), rounds=settings.rounds)
    for number in turns:
        one = loads[number]
        read = one.contender.files or files
        prepare(state, read)
        settle_nbytes = 2 * sum(path.stat().st_size for path in read) if settings.settle else 0
        answer = fresh.call(
            workspace, one.contender.function, settle_nbytes=settle_nbytes, **one.contender.arguments
        ).value
        one.seconds.append(answer["seconds"])
        one.nbytes, one.digests = answer["nbytes"], answer.get("digests")
        say(f"shards, {state}: {one.contender.name}: {answer['seconds']:.2f} s")
    rivals = [one for one in loads if one.contender.rival]
    if any(one.digests != rivals[0].digests for one in rivals):
        raise RuntimeError("contenders made different parameters of one rank")
    return loads


def _table(loads: Sequence[Loads], nbytes: int) -> Table:
    rows = []
    for name in dict.fromkeys(one.contender.name for one in loads):
        cells = [name]
        for state in STATES:
            one = next(load for load in loads if load.contender.name == name and load.state == state)
            spread = f"{min(one.seconds):.2f}–{max(one.seconds):.2f}"
            cells += [f"{one.median_s:.2f}", spread, gigabytes_per_second(one.nbytes, one.median_s)]
        rows.append(tuple(cells))
    figures = (f"{state} {what}" for state in STATES for what in ("s", "range", "GB/s made"))
    return Table(
        f"Shards of a checkpoint of {size(nbytes)} of bf16 (medians of {len(loads[0].seconds)})",
        ("", *figures),
        tuple(rows),
        ("GB/s made: of the finished shard; ours includes headers, plan, receipts twice, digests of rows, seals",),
    )


def _targets(loads: Sequence[Loads]) -> list[Target]:
    def median_s(name: str, state: State) -> float:
        return next(one.median_s for one in loads if one.contender.name == name and one.state == state)

    targets = []
    for state in STATES:
        rivals = {
            one.contender.name: one.median_s
            for one in loads
            if one.state == state and one.contender.rival and one.contender.name != OURS
        }
        fastest = min(rivals, key=rivals.__getitem__)
        speed = rivals[fastest] / median_s(OURS, state)
        text = f"one rank of {SIZE}, {state}: at least 2 times the fastest other loader that slices"
        targets.append(Target(text, f"{speed:.1f} times {fastest}", speed >= 2))
        share = median_s(WHOLE, state) / median_s(f"{WHOLE}, fp8", state)
        targets.append(
            Target(f"fp8 while loading, {state}: at least half the speed of the load", f"{share:.2f}", share >= 0.5)
        )
        limit = min(COPIES, key=lambda name: median_s(name, state))
        share = median_s(limit, state) / median_s(SNAPSHOT, state)
        large = median_s(LARGE_COPY, state) / median_s(SNAPSHOT, state)
        text = f"a snapshot, {state}: at least 0.9 of the best copy into the kernel's pages"
        targets.append(Target(text, f"{share:.2f} of {limit}; {large:.2f} of one into pages of 2 MiB", share >= 0.9))
    return targets
