"""(a) Attach: from nothing to the last tensor usable, by number of tensors and by bytes, beside per-tensor sharing."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from tests.benchmarks import checkpoints, fresh
from tests.benchmarks.checkpoints import Written
from tests.benchmarks.daemon import Daemon, serving
from tests.benchmarks.machine import SPARE_BYTES, meminfo_nbytes
from tests.benchmarks.outcome import GIB, Outcome, Settings, Table, Target, milliseconds, ratio, size
from tests.benchmarks.page_cache import make_cold
from tests.benchmarks.report import say
from tests.benchmarks.workspace import Workspace

STRATEGIES = ("file_system", "file_descriptor")


@dataclass(frozen=True)
class Cell:
    """Seconds of one way, for one number of tensors and bytes."""

    way: str
    count: int
    nbytes: int
    warm: tuple[float, ...]
    """In a process that has attached before."""
    fresh: tuple[float, ...]
    """In a process of its own, after imports."""
    whole: tuple[float, ...]
    """Of our warm ones, with what the call does before it connects."""
    imports: tuple[float, ...]
    """Of those processes: start of Python, imports of torch and of what is measured."""

    @property
    def warm_s(self) -> float:
        return statistics.median(self.warm)


def run(settings: Settings, workspace: Workspace) -> Outcome:
    counts = (1000,) if settings.quick else (10, 1000, 10000)
    sizes, left_out = _fitting([GIB // 10, GIB // 4] if settings.quick else [GIB // 10, GIB, 8 * GIB])
    cells: list[Cell] = []
    for count in counts:
        written = [
            checkpoints.many_tensors(workspace.directory / f"many-{count}-{nbytes}", count=count, nbytes=nbytes)
            for nbytes in sizes
        ]
        cells += _ours(settings, workspace, count, sizes, written)
        say(f"attach: {count:,} tensors, weightcached done")
        for strategy in STRATEGIES:
            if strategy == "file_descriptor" and (lacking := _descriptors_lacking(count)):
                left_out.append(lacking)
                continue
            some = len(sizes) if not settings.quick else 1
            cells += _shared(settings, workspace, strategy, count, sizes[:some], written[:some])
            say(f"attach: {count:,} tensors, torch.multiprocessing, {strategy} done")
        for one in written:
            workspace.remove(one.directory)
    return Outcome(
        "attach",
        [_table(cells, left_out)],
        list(_targets(cells)),
        {"cells": [asdict(cell) for cell in cells]},
    )


def _fitting(sizes: Sequence[int]) -> tuple[list[int], list[str]]:
    """The sizes whose segments fit into memory together, smallest first; and words about the others."""
    available = min(meminfo_nbytes("MemAvailable"), shutil.disk_usage("/dev/shm").free) - SPARE_BYTES
    fitting = [total for total, upto in zip(sizes, itertools.accumulate(sizes), strict=True) if upto <= available]
    return fitting, [
        f"{size(left)} was left out: all sizes together need {size(sum(sizes) + SPARE_BYTES)} of free memory"
        for left in sizes[len(fitting) :]
    ]


def _descriptors_lacking(count: int) -> str | None:
    """Why a process cannot hold a descriptor for each tensor, and another while it is being fetched."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 2 * count + 100 <= hard:
        return None
    return f"file_descriptor, {count:,} tensors was left out: it needs {2 * count:,} descriptors, the limit is {hard:,}"


def _ours(
    settings: Settings, workspace: Workspace, count: int, sizes: Sequence[int], written: Sequence[Written]
) -> list[Cell]:
    """One daemon for each size, all at once, so that sizes take turns and are compared within the same minute."""
    with ExitStack() as stack:
        places = []
        for number, one in enumerate(written):
            daemon = stack.enter_context(serving(workspace, one.directory, name=f"size{number}"))
            _require_loaded(daemon, one)
            make_cold(one.files, tolerated=1.0)  # the daemon has its copy: leave memory to what follows
            places.append(daemon.attach_arguments(one.directory))
        warm = fresh.call(workspace, "measured.attaching:repeatedly", places=places, **_repeats(settings))
        alone = [
            [fresh.call(workspace, "measured.attaching:once", arguments=place) for place in places]
            for _ in range(_fresh_rounds(settings))
        ]
    return _cells("weightcached", count, sizes, warm, alone)


def _require_loaded(daemon: Daemon, written: Written) -> None:
    resident = daemon.report["resident_nbytes"]
    if resident < written.nbytes:
        raise RuntimeError(f"the daemon holds {resident} bytes of {written.nbytes}")


def _shared(
    settings: Settings,
    workspace: Workspace,
    strategy: str,
    count: int,
    sizes: Sequence[int],
    written: Sequence[Written],
) -> list[Cell]:
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(_producing(workspace, strategy, f"{strategy}-{number}", one))
            for number, one in enumerate(written)
        ]
        warm = fresh.call(
            workspace, "sharing.consumer:repeatedly", addresses=addresses, strategy=strategy, **_repeats(settings)
        )
        alone = [
            [fresh.call(workspace, "sharing.consumer:once", address=one, strategy=strategy) for one in addresses]
            for _ in range(_fresh_rounds(settings))
        ]
    return _cells(f"torch.multiprocessing, {strategy}", count, sizes, warm, alone)


@contextmanager
def _producing(workspace: Workspace, strategy: str, name: str, written: Written) -> Iterator[str]:
    address = str(workspace.runtime_dir / f"{name}.share")
    tensors = [(place.tensor.name, place.tensor.code, place.tensor.shape) for place in written.places]
    listed = workspace.directory / f"{name}.json"
    arguments = {"address": address, "strategy": strategy, "listed": str(listed)}
    listed.write_text(json.dumps(tensors))
    process = workspace.start(
        fresh.command("sharing.producer:serve", arguments),
        cwd=fresh.ROOT,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"},  # or copies made for sharing stay
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        if process.stdout is None or process.stdin is None or process.stdout.readline() != "serving\n":
            raise fresh.MeasuredFailure(f"the producer ({strategy}) did not come up")
        yield address
        process.stdin.close()
        process.wait()
    finally:
        workspace.end(process)
        if os.path.exists(address):
            os.unlink(address)


def _repeats(settings: Settings) -> dict[str, Any]:
    return {"rounds": 10, "budget_s": 2.0} if settings.quick else {"rounds": 50, "budget_s": 15.0}


def _fresh_rounds(settings: Settings) -> int:
    return 1 if settings.quick else 3


def _cells(
    way: str, count: int, sizes: Sequence[int], warm: fresh.Answer, alone: Sequence[Sequence[fresh.Answer]]
) -> list[Cell]:
    return [
        Cell(
            way=way,
            count=count,
            nbytes=nbytes,
            warm=tuple(warm.value["seconds"][number]),
            whole=tuple(warm.value["whole_s"][number]) if "whole_s" in warm.value else (),
            fresh=tuple(turn[number].value["seconds"] for turn in alone),
            imports=tuple(turn[number].imports_s for turn in alone),
        )
        for number, nbytes in enumerate(sizes)
    ]


def _table(cells: Sequence[Cell], left_out: Sequence[str]) -> Table:
    ours = {(cell.count, cell.nbytes): cell.warm_s for cell in cells if cell.way == "weightcached"}
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell.count, cell.nbytes)):
        fresh_s, imports_s = statistics.median(cell.fresh), statistics.median(cell.imports)
        rows.append(
            (
                cell.way,
                f"{cell.count:,}",
                size(cell.nbytes),
                milliseconds(cell.warm_s),
                milliseconds(statistics.median(cell.whole)) if cell.whole else "",
                milliseconds(fresh_s),
                milliseconds(imports_s + fresh_s),
                ratio(cell.warm_s, ours[cell.count, cell.nbytes]),
            )
        )
    columns = ("way", "tensors", "bytes", "warm ms", "whole call ms", "fresh ms", "with imports ms", "ours ×")
    return Table(
        "Attach: until the last tensor can be used (medians)",
        columns,
        tuple(rows),
        (
            "warm: in a process that did it before; fresh: in a new process after imports; with imports: from exec",
            "from connecting to the last tensor's first element; the whole call reads config.json and receipts before",
            "sizes take turns within one run; checkpoints are sparse files, what is served are as many real pages",
            *left_out,
        ),
    )


def _targets(cells: Sequence[Cell]) -> Iterator[Target]:
    ours = {(cell.count, cell.nbytes): cell.warm_s for cell in cells if cell.way == "weightcached"}
    small, large = min(nbytes for _, nbytes in ours), max(nbytes for _, nbytes in ours)
    worst_s = max(seconds for (count, _), seconds in ours.items() if count == 1000)
    yield Target("attach, 1,000 tensors, warm process: at most 5 ms", f"{milliseconds(worst_s)} ms", worst_s <= 5e-3)
    for count in sorted({count for count, _ in ours}):
        growth = ours[count, large] / ours[count, small]
        text = f"attach, {count:,} tensors: {size(large)} over {size(small)} at most 1.2"
        yield Target(text, f"{growth:.2f}", growth <= 1.2)
    for strategy in STRATEGIES:
        others = [cell for cell in cells if cell.way.endswith(strategy) and cell.count == 1000]
        least = min(cell.warm_s / ours[cell.count, cell.nbytes] for cell in others)
        text = f"attach, 1,000 tensors: at least 20 times faster than per-tensor sharing ({strategy})"
        yield Target(text, f"{least:.0f} times", least >= 20)
