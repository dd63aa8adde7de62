"""The descriptors that are kept: the vault of a host without systemd, while this process lives.

Owns every descriptor that was accepted, in the order in which they came, which is the order they are handed back in.
What they hold is nobody's business here: nothing is read, mapped or checked.
"""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from enum import Enum

from weightcached.protocol.fds import OwnedFds


class Outcome(Enum):
    KEPT = "kept"
    ALREADY_KEPT = "already kept"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class _Kept:
    name: str
    fd: int
    identity: tuple[int, ...] | None


class Store:
    """Keeps at most ``limit`` descriptors. Several may have one name."""

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def names(self) -> tuple[str, ...]:
        """In order."""
        return tuple(kept.name for kept in self._kept)

    @property
    def fds(self) -> tuple[int, ...]:
        """In order. They stay ours."""
        return tuple(kept.fd for kept in self._kept)

    def add(self, name: str, fds: OwnedFds, position: int) -> Outcome:
        """Take the descriptor at ``position`` if it is kept; else it stays where it is, to be closed there."""
        identity = _identity(fds[position])
        if identity is not None and any(kept.identity == identity for kept in self._kept):
            return Outcome.ALREADY_KEPT
        if len(self._kept) >= self.limit:
            return Outcome.FULL
        self._kept.append(_Kept(name, fds.take(position), identity))
        return Outcome.KEPT

    def remove(self, name: str) -> int:
        """Close every descriptor of that name; how many there were."""
        gone = [kept for kept in self._kept if kept.name == name]
        self._kept = [kept for kept in self._kept if kept.name != name]
        for kept in gone:
            os.close(kept.fd)
        return len(gone)

    def close(self) -> None:
        """Close everything. The memory is free as soon as nobody else holds it."""
        for name in set(self.names):
            self.remove(name)


def _identity(fd: int) -> tuple[int, ...] | None:
    """Equal for two descriptors of one file that were opened alike, as systemd tells them without kcmp(2).

    None for what cannot be told that way: two descriptors of one device may be two contexts, and anonymous inodes
    (event descriptors and their kind) share one number.
    """
    found = os.fstat(fd)
    kind = stat.S_IFMT(found.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFSOCK, stat.S_IFIFO, stat.S_IFDIR):
        return None
    return (found.st_dev, found.st_ino, kind, fcntl.fcntl(fd, fcntl.F_GETFL))
