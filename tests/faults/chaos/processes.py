"""What processes of a run hold, read from /proc. Owns nothing; every process of a run has its mark in its environment.

All of it may be read while processes come and go: what is gone meanwhile is not there.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

WEIGHTS = "memfd of weights"
MARK = "WEIGHTCACHED_CHAOS_RUN"

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_WEIGHTS = re.compile(r"/memfd:weightcached:([0-9a-f]{32}):")


def marked(mark: str) -> set[int]:
    """Processes of the run that are alive (zombies have no environment)."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(*_GONE):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.add(int(name))
    return found


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except _GONE:
        return []


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except _GONE:
        return ""


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except _GONE:
        return False


def _links(pid: int) -> Iterator[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except _GONE:
        return
    for name in names:
        with suppress(*_GONE):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def descriptors(pid: int) -> Counter[str]:
    """How many descriptors of each kind a process has."""
    return Counter(_kind(link) for link in _links(pid))


def _kind(link: str) -> str:
    if _WEIGHTS.match(link):
        return WEIGHTS
    for prefix in ("socket", "pipe"):
        if link.startswith(prefix + ":"):
            return prefix
    return link.removesuffix(" (deleted)")


def connected_at(path: Path) -> int:
    """How many connections were accepted at a socket that was bound as ``path``."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(words[5] == "03" and words[-1] == str(path) for line in lines if (words := line.split()))


def threads(pid: int) -> Counter[str]:
    """How many threads a process has."""
    try:
        return Counter({"thread": len(os.listdir(f"/proc/{pid}/task"))})
    except _GONE:
        return Counter()


def generations_held(pid: int) -> set[str]:
    """Generations of which a process holds a descriptor or a mapping."""
    held = {match[1] for link in _links(pid) if (match := _WEIGHTS.match(link))}
    with suppress(*_GONE):
        held |= {match[1] for match in _WEIGHTS.finditer(Path(f"/proc/{pid}/maps").read_text(errors="replace"))}
    return held


def memfd_nbytes(pids: Iterable[int], *, of_weights: bool = False) -> int:
    """Memory behind all memfds (those ``of_weights``) that these processes hold a descriptor of, each counted once."""
    found = {}
    for pid in pids:
        with suppress(*_GONE):
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                with suppress(*_GONE):
                    link = os.readlink(path)
                    if _WEIGHTS.match(link) or (not of_weights and link.startswith("/memfd:")):
                        status = os.stat(path)
                        found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def anonymous_mib(pid: int) -> float:
    """The process's own memory."""
    with suppress(*_GONE):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return 0.0


def lock_holders(path: Path) -> int:
    """How many hold a flock on the file."""
    found = path.stat()
    wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    lines = Path("/proc/locks").read_text().splitlines()
    return sum("->" not in line and " FLOCK " in line and wanted in line.split() for line in lines)
