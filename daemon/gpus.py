"""Who holds a GPU's memory beside the daemons and their engines, seen by NVML: what no daemon's book can list.

An engine that goes on with weights which its daemon has given up holds memory that nobody else knows of, and so does a
program that has nothing to do with this one: NVML tells them apart as little as it knows what a process has mapped. So
what is said is which processes no daemon knows, and how much NVML says they hold. Owns finding that; used by the
exporter and by ``weightcached status``. Takes no memory of a GPU, and makes no context. Blocks for as long as NVML
takes.

Known are the processes with a lease, by the number their daemon sees them by, and the daemons' own children (a worker
that loads, a process that verifies). NVML has the host's numbers: in a container with PIDs of its own nobody is known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightcached.daemon.seen import Seen
from weightcached.daemon.text import binary_size
from weightcached.protocol.errors import DeviceAbsent, WeightCacheError
from weightcached.protocol.memory.chosen import GPU_PREFIX
from weightcached.protocol.memory.cuda import nvml
from weightcached.protocol.messages import Report


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment. ``problem`` says why the figures are not there, where they are not."""

    uuid: str
    total_nbytes: int = 0
    used_nbytes: int = 0
    cached_nbytes: int = 0
    """What daemons say that they hold there."""
    strangers: tuple[nvml.Holder, ...] = ()
    """Processes that no daemon knows, most memory first."""
    problem: str | None = None

    @property
    def device(self) -> str:
        """As places call it."""
        return GPU_PREFIX + self.uuid

    @property
    def unexplained_nbytes(self) -> int:
        """What NVML says that strangers hold; of some it does not say (:attr:`untold`)."""
        return sum(holder.nbytes or 0 for holder in self.strangers)

    @property
    def untold(self) -> int:
        """Strangers of which NVML does not say how much they hold."""
        return sum(holder.nbytes is None for holder in self.strangers)


def as_json(gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Everything known of GPUs, for programs: what stands beside the daemons in a document."""
    return {"gpus": [_json(gpu) for gpu in gpus]}


def _json(gpu: Gpu) -> dict[str, Any]:
    if gpu.problem is not None:
        return {"device": gpu.device, "problem": gpu.problem}
    return {
        "device": gpu.device,
        "total_nbytes": gpu.total_nbytes,
        "used_nbytes": gpu.used_nbytes,
        "cached_nbytes": gpu.cached_nbytes,
        "unexplained_nbytes": gpu.unexplained_nbytes,
        "unexplained_processes": [{"pid": holder.pid, "nbytes": holder.nbytes} for holder in gpu.strangers],
    }


def in_words(gpu: Gpu) -> str:
    """One line for people."""
    if gpu.problem is not None:
        return f"{gpu.device}: {gpu.problem}"
    line = f"{gpu.device}: {binary_size(gpu.used_nbytes)} of {binary_size(gpu.total_nbytes)} used"
    line += f", {binary_size(gpu.cached_nbytes)} of it by the daemons' weights"
    if gpu.strangers:
        line += f"; held by processes that no daemon knows: {', '.join(map(nvml.holder_in_words, gpu.strangers))}"
    return line


@dataclass(frozen=True)
class _Known:
    """What the daemons of one GPU know."""

    cached_nbytes: int = 0
    keepers: frozenset[int] = field(default_factory=frozenset)
    engines: frozenset[int] = field(default_factory=frozenset)


def look_at_gpus(seen: Sequence[Seen], *, proc: Path = Path("/proc")) -> tuple[Gpu, ...]:
    """Every GPU that NVML shows, and every one that a place is on. None where there is no NVML."""
    places = {one.place.device.removeprefix(GPU_PREFIX) for one in seen if one.place.device.startswith(GPU_PREFIX)}
    try:
        shown = nvml.uuids()
    except DeviceAbsent:
        return ()
    except WeightCacheError as error:
        return tuple(Gpu(uuid, problem=str(error)) for uuid in sorted(places))
    return tuple(_look(uuid, _known(uuid, seen), proc) for uuid in (*shown, *sorted(places - set(shown))))


def _known(uuid: str, seen: Sequence[Seen]) -> _Known:
    reports = [one.report for one in seen if one.report is not None and one.place.device == GPU_PREFIX + uuid]
    return _Known(
        sum(_held_nbytes(report) for report in reports),
        frozenset(report.pid for report in reports),
        frozenset(lease.pid for report in reports for lease in report.leases),
    )


def _held_nbytes(report: Report) -> int:
    """Of all generations; a daemon of an earlier release lists only the one that it serves."""
    listed = sum(one.resident_nbytes for one in report.held)
    return max(listed, report.resident_nbytes) + report.quarantined_nbytes


def _look(uuid: str, known: _Known, proc: Path) -> Gpu:
    try:
        memory, holders = nvml.memory(uuid), nvml.holders(uuid)
    except WeightCacheError as error:
        return Gpu(uuid, problem=str(error))
    strangers = tuple(
        holder for holder in holders if holder.pid not in known.engines and not _is_of(holder.pid, known.keepers, proc)
    )
    return Gpu(uuid, memory.total_nbytes, memory.used_nbytes, known.cached_nbytes, strangers)


def _is_of(pid: int, keepers: Collection[int], proc: Path) -> bool:
    """Whether it is a daemon, or a daemon's child."""
    if pid in keepers:
        return True
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:  # it has ended, or is of another container
        return False
    return int(stat.rpartition(")")[2].split()[1]) in keepers
