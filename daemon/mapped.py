"""Which weights processes of this host map, seen from ``/proc``: memory that no daemon's book can list.

An engine that goes on with a generation which its daemon has given up holds memory that nobody else knows of. Owns
finding it; used by the exporter. Sees the processes of its own PID namespace, and of other users only as root (or with
CAP_SYS_PTRACE); it says how many it could not look into. Blocks for as long as reading ``/proc`` takes.
"""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from weightcached.protocol.memory import names

_MEMFD = b"/memfd:weightcached:"


@dataclass(frozen=True, slots=True)
class Mapped:
    """What is mapped, and not known to any daemon that was asked."""

    nbytes: int = 0
    """Of memory: what several processes map counts once."""
    processes: int = 0
    hidden: int = 0
    """Processes that could not be looked into."""


def unexplained(known: Set[str], *, proc: Path = Path("/proc")) -> Mapped:
    """Segments that processes map and that belong to none of the ``known`` generations."""
    segments: dict[str, int] = {}
    processes = hidden = 0
    for entry in os.listdir(proc):
        if not entry.isdigit():
            continue
        try:
            found = _segments(proc / entry / "maps", known)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except PermissionError:
            hidden += 1
            continue
        processes += bool(found)
        for name, nbytes in found.items():
            segments[name] = max(nbytes, segments.get(name, 0))
    return Mapped(sum(segments.values()), processes, hidden)


def _segments(maps: Path, known: Set[str]) -> dict[str, int]:
    """Name of the memfd → how many of its bytes the process can reach; manifests are left out."""
    text = maps.read_bytes()
    found: dict[str, int] = {}
    if _MEMFD not in text:
        return found
    for line in text.splitlines():
        if _MEMFD not in line:
            continue
        span, _, offset, _, _, path = line.split(maxsplit=5)
        name = path.decode("ascii", "replace").removeprefix("/memfd:").removesuffix(" (deleted)")
        part = names.part_of(name)
        if part is None or part[1] is None or part[0] in known:
            continue
        begin, _, end = span.partition(b"-")
        reached = int(offset, 16) + int(end, 16) - int(begin, 16)
        found[name] = max(reached, found.get(name, 0))
    return found
