"""(b) Load: a checkpoint from disk into memory that the process owns; ours beside other loaders and plain copies.

Contenders take turns, each load in a process of its own (`fresh.py` says why), the clock inside it. Every one proves
by a digest that it has the real bytes.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.benchmarks import checkpoints, fresh
from tests.benchmarks.checkpoints import Place, Written
from tests.benchmarks.machine import require_memory
from tests.benchmarks.outcome import GIB, MIB, Outcome, Settings, Table, Target, gigabytes_per_second, size
from tests.benchmarks.page_cache import make_cold, make_warm
from tests.benchmarks.report import say
from tests.benchmarks.turns import Turns
from tests.benchmarks.workspace import Workspace

Group = Literal["ours", "loader", "segment", "private", "large"]
"""``segment`` and ``private`` are copies into pages as the kernel gives them; ``large`` ones make pages of 2 MiB first,
one of them by the very means that ours has.
"""
State = Literal["warm", "cold"]
STATES: tuple[State, ...] = ("warm", "cold")
_MEMORY = {
    True: "memory was settled before each load: taken, touched and given back (--no-settle leaves that out)",
    False: "memory was not settled: on a virtual machine, loads that its host has to find memory for take far longer",
}


@dataclass(frozen=True)
class Contender:
    """One way to load. ``function`` is below `tests.benchmarks.loading`; ``package`` is what has to be installed."""

    name: str
    group: Group
    function: str
    package: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False
    """Whether ``--quick`` takes it."""

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


def _copies() -> Iterator[Contender]:
    ways: tuple[tuple[str, Group, str, str, tuple[int, ...]], ...] = (
        ("segment", "segment", "sendfile", "segment_sendfile", (1, 2)),
        ("segment", "segment", "pwrite from the mapped file", "segment_pwrite", (2,)),
        ("segment", "segment", "pread, mapped", "segment_pread", (2,)),
        ("segment", "large", "pread, huge pages", "segment_huge_pread", (2,)),
        ("private", "private", "pread", "private_pread", (1, 2)),
        ("private", "large", "pread, huge pages", "private_huge_pread", (2,)),
    )
    for memory, group, name, function, numbers in ways:
        for threads in numbers:
            yield Contender(
                f"copy to {memory}: {name}, {threads} thread{'s' * (threads > 1)}",
                group,
                f"plain_copies:{function}",
                options={"threads": threads},
                quick=threads == 2 and function in ("segment_sendfile", "segment_huge_pread"),
            )


CONTENDERS = (
    Contender("weightcached, layout hf", "ours", "ours:load", options={"layout": "hf"}, quick=True),
    Contender("weightcached, layout fused", "ours", "ours:load", options={"layout": "fused"}),
    Contender(
        "weightcached, layout hf, past the page cache",
        "ours",
        "ours:load",
        options={"layout": "hf", "strategy": "direct"},
    ),
    Contender(
        "safetensors load_file + clone", "loader", "safetensors_library:load_file_and_clone", package="safetensors"
    ),
    Contender(
        "safetensors safe_open + clone",
        "loader",
        "safetensors_library:safe_open_and_clone",
        package="safetensors",
        quick=True,
    ),
    Contender("fastsafetensors", "loader", "fastsafetensors_library:load", package="fastsafetensors"),
    Contender(
        "fastsafetensors, not O_DIRECT",
        "loader",
        "fastsafetensors_library:load",
        package="fastsafetensors",
        environment={"FASTSAFETENSORS_ODIRECT": "0"},
    ),
    Contender(
        "runai-model-streamer",
        "loader",
        "runai_streamer_library:buffers_handed_over",
        package="runai_model_streamer",
        quick=True,
    ),
    Contender(
        "runai-model-streamer + copy", "loader", "runai_streamer_library:private_copies", package="runai_model_streamer"
    ),
    *_copies(),
)


@dataclass(frozen=True)
class Loads:
    """What one contender did in one state of the page cache."""

    contender: Contender
    state: State
    seconds: tuple[float, ...]
    nbytes: int
    details: tuple[dict[str, Any], ...]
    """Whatever else each load reported."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def seconds_per_byte(self) -> float:
        """What is compared: files hold a few headers more than tensors do."""
        return self.median_s / self.nbytes


def prepare(state: State, files: Sequence[Path]) -> None:
    """Bring the files' pages into that state of the page cache."""
    (make_warm if state == "warm" else make_cold)(files)


def run(settings: Settings, workspace: Workspace) -> Outcome:
    nbytes = int(settings.load_gib * GIB)
    require_memory(3 * nbytes, what="load")  # the files in the page cache, a copy, and buffers of the same size
    written = checkpoints.dense_decoder(workspace.directory / "load", nbytes=nbytes, files=max(2, nbytes // GIB))
    chosen = [one for one in CONTENDERS if one.installed and (one.quick or not settings.quick)]
    missing = sorted({one.package for one in CONTENDERS if not one.installed and one.package})
    loads = [one for state in STATES for one in _measure(state, chosen, settings, workspace, written)]
    digest = fresh.call(workspace, "loading.ours:content_digest_alone", directory=str(written.directory)).value
    workspace.remove(written.directory)
    notes = [_MEMORY[settings.settle], *_beside_large_pages(loads)]
    notes += [f"not installed, so not measured: {', '.join(missing)} (pip install -e '.[bench]')"] if missing else []
    return Outcome(
        "load",
        [_table(loads, written, digest, notes), _stages(loads)],
        list(_targets(loads)),
        {
            "loads": [asdict(one) for one in loads],
            "content_digest": digest,
            "nbytes": written.nbytes,
            "files": len(written.files),
        },
    )


def _measure(
    state: State, chosen: Sequence[Contender], settings: Settings, workspace: Workspace, written: Written
) -> list[Loads]:
    sample = _sample(written)
    answers: list[list[dict[str, Any]]] = [[] for _ in chosen]
    turns = Turns(len(chosen), rounds=settings.rounds)
    for number in turns:
        prepare(state, written.files)
        settle_nbytes = _fresh_nbytes(state, written) if settings.settle else 0
        answer = _load(chosen[number], workspace, written, sample, settle_nbytes=settle_nbytes)
        turns.add(number, answer["seconds"])
        answers[number].append(answer)
        say(f"load, {state}: {chosen[number].name}: {answer['seconds']:.2f} s")
    _require_same_bytes(chosen, answers)
    return [
        Loads(one, state, tuple(seconds), given[0]["nbytes"], tuple(given))
        for one, seconds, given in zip(chosen, turns.seconds, answers, strict=True)
    ]


def _fresh_nbytes(state: State, written: Written) -> int:
    """Pages a load takes: for what it makes, and, cold, for the page cache too."""
    return (2 if state == "cold" else 1) * written.nbytes + 256 * MIB


def _load(
    contender: Contender, workspace: Workspace, written: Written, sample: Place, *, settle_nbytes: int
) -> dict[str, Any]:
    files = [str(path) for path in written.files]
    wanted: Any = sample.tensor.name
    if contender.function.startswith("plain_copies:"):  # these know files, not tensors
        number = [path.name for path in written.files].index(sample.file)
        wanted = (number, sample.offset, sample.tensor.nbytes)
    return fresh.call(
        workspace,
        f"loading.{contender.function}",
        environment=contender.environment,
        settle_nbytes=settle_nbytes,
        directory=str(written.directory),
        files=files,
        sample=wanted,
        **contender.options,
    ).value


def _sample(written: Written) -> Place:
    """The tensor whose bytes every contender has to show: one that no layout fuses, from the last file."""
    return next(
        place
        for place in reversed(written.places)
        if place.tensor.name.endswith("down_proj.weight") and place.file == written.files[-1].name
    )


def _require_same_bytes(chosen: Sequence[Contender], answers: Sequence[Sequence[dict[str, Any]]]) -> None:
    digests = {one.name: {answer["sample"] for answer in given} for one, given in zip(chosen, answers, strict=True)}
    if len(set.union(*digests.values())) != 1:
        raise RuntimeError(f"contenders loaded different bytes: {digests}")


def _ours(loads: Sequence[Loads], state: State) -> Loads:
    return next(one for one in loads if one.contender.group == "ours" and one.state == state)


def _fastest(loads: Sequence[Loads], state: State, *groups: Group) -> Loads | None:
    some = [one for one in loads if one.state == state and one.contender.group in groups]
    return min(some, key=lambda one: one.seconds_per_byte, default=None)


def _table(loads: Sequence[Loads], written: Written, digest: Mapping[str, float], notes: Sequence[str]) -> Table:
    rows = []
    for contender in dict.fromkeys(one.contender.name for one in loads):
        cells = [contender]
        for state in STATES:
            one = next(load for load in loads if load.contender.name == contender and load.state == state)
            speed = one.seconds_per_byte / _ours(loads, state).seconds_per_byte
            spread = f"{min(one.seconds):.2f}–{max(one.seconds):.2f}"
            cells += [f"{one.median_s:.2f}", spread, gigabytes_per_second(one.nbytes, one.median_s), f"{speed:.2f}"]
        rows.append(tuple(cells))
    figures = (f"{state} {what}" for state in STATES for what in ("s", "range", "GB/s", "× ours"))
    columns = ("into memory of its own", *figures)
    return Table(
        f"Load: {size(written.nbytes)} of bf16 in {len(written.files)} files (medians of {len(loads[0].seconds)})",
        columns,
        tuple(rows),
        (
            "× ours: time over ours; ours includes headers, plan, receipts twice, digests of rows, seals",
            "a segment can be mapped by other processes, private memory cannot; each load in a new process, in turns",
            f"the content digest, once per host and after publishing, is not in it: {digest['warm_s']:.2f} s with the "
            f"files in the page cache, {gigabytes_per_second(written.nbytes, digest['warm_s'])} GB/s",
            *notes,
        ),
    )


def _stages(loads: Sequence[Loads]) -> Table:
    """Where our own seconds went, by the pipeline's own account: the load with the median time."""
    rows = []
    for one in loads:
        if one.contender.group != "ours":
            continue
        typical = sorted(one.details, key=lambda detail: detail["seconds"])[len(one.details) // 2]
        stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in typical["stages"].items())
        rows.append((one.contender.name, one.state, f"{typical['seconds']:.3f}", stages))
    return Table("Load: where our seconds go", ("", "page cache", "s", "of which"), tuple(rows))


def _targets(loads: Sequence[Loads]) -> Iterator[Target]:
    for state in STATES:
        ours = _ours(loads, state).seconds_per_byte
        if peer := _fastest(loads, state, "loader"):
            speed = peer.seconds_per_byte / ours
            yield Target(
                f"load, {state}: no slower than the fastest other loader", f"{_times(speed, peer)}", speed >= 1.0
            )
        if limit := _fastest(loads, state, "segment", "private"):
            speed = limit.seconds_per_byte / ours
            yield Target(
                f"load, {state}: at least 0.9 of the best copy into the kernel's pages",
                f"{_times(speed, limit)}",
                speed >= 0.9,
            )


def _beside_large_pages(loads: Sequence[Loads]) -> Iterator[str]:
    """Not a target: what digests cost is more than a tenth of such a copy."""
    for state in STATES:
        if large := _fastest(loads, state, "large"):
            speed = large.seconds_per_byte / _ours(loads, state).seconds_per_byte
            yield f"{state}, ours has {_times(speed, large)}, which digests nothing"


def _times(speed: float, other: Loads) -> str:
    return f"{speed:.2f} of the speed of {other.contender.name}"
