"""What kind of machine the numbers are from: read from the system, never guessed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.outcome import GIB, size

SPARE_BYTES = GIB

_PACKAGES = ("torch", "numpy", "safetensors", "fastsafetensors", "runai-model-streamer", "weightcached")


def facts(arguments: Sequence[str]) -> dict[str, Any]:
    """For the head of a report. Needs no package to be imported."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": shlex.join(["python", "-m", "tests.benchmarks", *arguments]),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{meminfo_nbytes('MemTotal') / (1 << 30):.1f} GiB",
        "huge pages": f"anonymous: {_thp('enabled')}; shared memory: {_thp('shmem_enabled')}",
        "load average at the start": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        **{package: _version(package) for package in _PACKAGES},
    }


class TooLittleMemory(RuntimeError):
    """A benchmark would push the machine, and whatever else runs on it, out of memory."""


def require_memory(nbytes: int, *, what: str) -> None:
    """Refuse to start what needs ``nbytes`` of memory when that much and a GiB beside it is not free."""
    available = meminfo_nbytes("MemAvailable")
    if available < nbytes + SPARE_BYTES:
        raise TooLittleMemory(f"{what} needs {size(nbytes + SPARE_BYTES)} of free memory, there are {size(available)}")


def meminfo_nbytes(field: str) -> int:
    """A line of ``/proc/meminfo``, such as ``MemAvailable``."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise KeyError(field)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _thp(name: str) -> str:
    """The chosen word of a ``[chosen] other`` file of transparent huge pages."""
    try:
        words = Path("/sys/kernel/mm/transparent_hugepage", name).read_text().split()
    except FileNotFoundError:
        return "not in this kernel"
    return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
