"""Is there room for a shard? Measured before anything is read: free memory of the host, and of every cgroup above us.

Owns reading ``/proc/meminfo`` and the memory controllers of cgroup v1 and v2, and the refusal with its numbers. Called
between plan and allocation: by the keeper, and by a client that loads from disk. It is a measurement, not a
reservation: who allocates faster can still take the memory, and then the kernel decides.

Page cache counts as used in a cgroup but is given back under pressure, so file pages are added to what is free there.
Memory-backed files (what segments are) are not among those pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from weightcached.protocol.errors import InsufficientMemory

HEADROOM_BYTES = 64 * 1024 * 1024
"""For the manifest and the worker's buffers, beside the segments."""

_UNLIMITED_BYTES = 1 << 62  # v1 says "no limit" with the largest multiple of a page


@dataclass(frozen=True, slots=True)
class Room:
    """How much one limit leaves. ``source`` says which: a file's path."""

    source: str
    free_nbytes: int
    limit_nbytes: int


@dataclass(frozen=True, slots=True)
class _Controller:
    """What a cgroup version calls its files."""

    limit: str
    usage: str
    file_pages: tuple[str, ...]


_V1 = _Controller("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Controller("memory.max", "memory.current", ("inactive_file", "active_file"))


def admit(nbytes: int, *, proc: Path = Path("/proc")) -> Room:
    """The tightest limit, if ``nbytes`` of segments and some headroom fit under it; InsufficientMemory if not."""
    tightest = min(rooms(proc), key=lambda room: room.free_nbytes)
    needed = nbytes + HEADROOM_BYTES
    if needed > tightest.free_nbytes:
        raise InsufficientMemory(
            "the shard does not fit in the memory that is free now",
            expected=f"{needed} bytes free ({nbytes} for the shard, {HEADROOM_BYTES} beside it)",
            found=f"{tightest.free_nbytes} bytes free of {tightest.limit_nbytes}",
            where=tightest.source,
            next_step="free memory, raise that limit, or split the model over more ranks; then start again",
        )
    return tightest


def rooms(proc: Path = Path("/proc")) -> list[Room]:
    """Every limit that applies to this process: the host's memory first, then its cgroups from the inside out."""
    return [_host(proc), *_cgroups(proc)]


def _host(proc: Path) -> Room:
    path = proc / "meminfo"
    numbers = {}
    for line in path.read_text().splitlines():
        key, _, rest = line.partition(":")
        numbers[key] = int(rest.split()[0]) * 1024
    return Room(f"MemAvailable in {path}", numbers["MemAvailable"], numbers["MemTotal"])


def _cgroups(proc: Path) -> Iterator[Room]:
    mounts = _mounts(proc)
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files, key = _V2, "cgroup2"
        elif "memory" in controllers.split(","):
            files, key = _V1, "memory"
        else:
            continue
        if key in mounts:
            for directory in _from_inside_out(mounts[key], path):
                if (room := _room(directory, files)) is not None:
                    yield room


def _mounts(proc: Path) -> dict[str, tuple[str, Path]]:
    """``memory`` (v1) and ``cgroup2`` → (root within the hierarchy, mount point), as this mount namespace sees them."""
    found: dict[str, tuple[str, Path]] = {}
    for line in (proc / "self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("cgroup2", (root, Path(point)))
        elif kind == "cgroup" and "memory" in options.split(","):
            found.setdefault("memory", (root, Path(point)))
    return found


def _from_inside_out(mount: tuple[str, Path], path: str) -> Iterator[Path]:
    """The directories of ``path`` and all groups above it that the mount shows, innermost first.

    A container may see its own group as the mount's root while ``/proc/self/cgroup`` still shows the host's path, or a
    path that leads out of its namespace (``/..``): then the mount itself is the innermost group there is to see.
    """
    root, point = mount
    try:
        inside = PurePosixPath(path).relative_to(root)
    except ValueError:
        inside = PurePosixPath()
    if ".." in inside.parts or not (point / inside).is_dir():
        inside = PurePosixPath()
    yield point / inside
    yield from (point / parent for parent in inside.parents)


def _room(directory: Path, files: _Controller) -> Room | None:
    """What one group's limit leaves; ``None`` where it has none."""
    limit_path = directory / files.limit
    try:
        limit_text = limit_path.read_text().strip()
        if limit_text == "max" or int(limit_text) >= _UNLIMITED_BYTES:
            return None
        used = int((directory / files.usage).read_text())
        statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None  # the root group, or one in which the controller is not switched on
    reclaimable = sum(int(statistics.get(name, 0)) for name in files.file_pages)
    limit = int(limit_text)
    return Room(os.fspath(limit_path), max(0, limit - used + min(reclaimable, used)), limit)
