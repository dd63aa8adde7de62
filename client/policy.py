"""What is found at a place's path, and what the contract says about it. Pure: decides, and touches nothing.

:func:`judge` is the table of the design's section 9 as far as it can be told from two system calls made in this order:
``connect``, then ``lstat``. The other order would call a place absent that was there all along: a daemon's restart
renames its new socket over the old one, between the two calls.

``connect.py`` makes the calls and acts on the answer.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from weightcached.protocol.errors import DaemonAbsent, DaemonUnreachable, InvalidPlace


class Finding(Enum):
    """What to do next."""

    CONNECTED = auto()
    """Somebody listens: find out whether to trust them."""
    ABSENT = auto()
    """No weights are cached here."""
    CHANGED = auto()
    """The path changed between the two calls: look again, at once."""
    BUSY = auto()
    """The backlog is full: try again until the deadline."""
    REFUSED = auto()
    """A socket file that nobody listens on: its daemon died after binding."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What ``lstat`` said: the mode of what is there, or the error number."""

    mode: int | None = None
    error: int = 0

    @classmethod
    def at(cls, path: Path) -> Entry:
        """Look at ``path`` itself, not at what a link there points to."""
        try:
            return cls(mode=os.lstat(path).st_mode)
        except OSError as error:
            return cls(error=error.errno or errno.EIO)

    @property
    def absent(self) -> bool:
        return self.error == errno.ENOENT

    @property
    def is_socket(self) -> bool:
        return self.mode is not None and stat.S_ISSOCK(self.mode)

    def __str__(self) -> str:
        return os.strerror(self.error) if self.mode is None else stat.filemode(self.mode)


_CANNOT_BE_A_PLACE = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})


def judge(connect_error: int, entry: Entry, path: Path) -> Finding:
    """The contract's row for ``connect`` ending in ``connect_error`` (0: it succeeded) and then ``lstat`` in ``entry``.

    Raises InvalidPlace for what can be no daemon's place, DaemonUnreachable for an error that has no row.
    """
    for number in (connect_error, entry.error):
        if number in _CANNOT_BE_A_PLACE:
            raise _invalid(path, found=os.strerror(number))
    if entry.mode is not None and not entry.is_socket:
        raise _invalid(path, found=_kind(entry.mode))
    if connect_error == 0:
        return Finding.CONNECTED
    if connect_error == errno.ENOENT:
        return Finding.ABSENT if entry.absent else Finding.CHANGED
    if connect_error == errno.EAGAIN:
        return Finding.BUSY
    if connect_error == errno.ECONNREFUSED:
        return Finding.CHANGED if entry.absent else Finding.REFUSED
    if connect_error == errno.EPROTOTYPE:
        raise _invalid(path, found="a socket of another type")
    raise DaemonUnreachable("cannot connect to the daemon", found=os.strerror(connect_error), where=path)


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return f"something that is not a socket ({stat.filemode(mode)})"


def _invalid(path: Path, *, found: str) -> InvalidPlace:
    return InvalidPlace(
        "this cannot be a daemon's place",
        expected="a socket that we may connect to, or nothing at all",
        found=found,
        where=path,
        next_step="look at what is there; the engine needs the daemon's --runtime-dir and --name, and access to it",
    )


def refused(path: Path) -> DaemonUnreachable:
    """The error for :attr:`Finding.REFUSED`. Who is told so has not been connected: there is nothing to wait for."""
    return DaemonUnreachable(
        "nobody answers at the daemon's socket: the daemon died after binding it",
        expected="a listening daemon",
        found="connection refused, without having been connected before",
        where=path,
        next_step="start the daemon again (its log says why it ended), or remove the socket file to load from disk",
    )


def absence(path: Path, near: list[Path]) -> str:
    """One sentence about an absent place: the path tried, and the sockets found near it."""
    found = ", ".join(map(str, near[:8])) if near else "none"
    return f"no daemon's socket at {path}; sockets found near it: {found}"


def absent(path: Path, near: list[Path], *, instead: str) -> DaemonAbsent:
    """The error for :attr:`Finding.ABSENT` where there is no falling back to disk. ``instead`` is the other way out."""
    return DaemonAbsent(
        "no weights are cached at this place",
        expected="a daemon's socket",
        found=absence(path, near),
        where=path,
        next_step=f"start the daemon before the engine, or {instead}",
    )
