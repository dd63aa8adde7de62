"""Who is at the other end, and whether to trust a path before speaking through it.

Owns peer credentials (``SO_PEERCRED``, ``SO_PEERGROUPS``), the allow-list of user and group ids, and the checks on the
runtime directory, the way to it and the socket file. Both sides use the same checks: a daemon on its clients and its
own directory, a client on its daemon.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from weightcached.protocol.errors import UntrustedDaemon

_UCRED = struct.Struct("3i")
_SO_PEERGROUPS = 59  # not in Python's socket module
_LINKS_MAX = 40
"""On one way, as in the kernel."""

_libc = ctypes.CDLL(None, use_errno=True)

_TRUST = "trust that user with --allow-uid (attach: allow_uids=)"


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected or listened, as the kernel recorded it at that moment."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = field(default=frozenset(), compare=False)
    """Its supplementary groups."""

    def __str__(self) -> str:
        return f"pid {self.pid}, uid {self.uid}, gid {self.gid}"


def peer_of(connection: socket.socket) -> Peer:
    """Credentials of the peer of a connected Unix socket. The pid is 0 when it lives outside our PID namespace."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid, gid, _groups_of(connection))


def _groups_of(connection: socket.socket) -> frozenset[int]:
    """Supplementary groups of the peer, however many. Empty on Linux before 4.13, which does not tell."""
    nbytes = ctypes.c_uint32(0)
    groups = array.array("I")
    while True:
        address, _ = groups.buffer_info()
        if not _libc.getsockopt(
            connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, ctypes.c_void_p(address), ctypes.byref(nbytes)
        ):
            return frozenset(groups[: nbytes.value // groups.itemsize])
        number = ctypes.get_errno()
        if number in (errno.ENOPROTOOPT, errno.ENODATA):
            return frozenset()
        if number != errno.ERANGE:
            raise OSError(number, os.strerror(number))
        groups = array.array("I", bytes(nbytes.value))  # the kernel has said how much room it needs


@dataclass(frozen=True, slots=True)
class AllowList:
    """User and group ids trusted beside root and ourselves. A peer has its own group and its supplementary ones."""

    uids: Collection[int] = field(default_factory=frozenset)
    gids: Collection[int] = field(default_factory=frozenset)

    def admits_uid(self, uid: int) -> bool:
        return uid in (0, os.geteuid()) or uid in self.uids

    def admits(self, peer: Peer) -> bool:
        return self.admits_uid(peer.uid) or peer.gid in self.gids or not peer.groups.isdisjoint(self.gids)


def check_directory(directory: Path, allowed: AllowList) -> None:
    """Refuse a directory that others can write to, or that somebody we do not trust owns: they could swap the socket.

    A sticky directory protects entries only from people who do not own it, so it counts as writable. Group-writable is
    refused unless the group is allowed. Symbolic links at ``directory`` itself are not followed; those on the way to it
    (``/var/run``) are, where nobody else could have put them there. Raises UntrustedDaemon; FileNotFoundError passes
    through.
    """
    check_way(directory, allowed)
    found = os.lstat(directory)
    where = directory
    if not stat.S_ISDIR(found.st_mode):
        raise UntrustedDaemon(
            "not a directory", expected="a directory", found=stat.filemode(found.st_mode), where=where
        )
    if not allowed.admits_uid(found.st_uid):
        raise UntrustedDaemon(
            "the directory belongs to someone we do not trust",
            expected=_owners(allowed),
            found=f"uid {found.st_uid}",
            where=where,
            next_step=f"{_TRUST}, or choose another runtime directory",
        )
    if _writable_by_others(found, allowed):
        raise UntrustedDaemon(
            "others can write to the directory, so anybody could have put a socket there",
            expected="mode 0755 or tighter",
            found=stat.filemode(found.st_mode),
            where=where,
            next_step=f"chmod go-w {directory}",
        )


def check_way(directory: Path, allowed: AllowList) -> None:
    """Refuse a way on which somebody we do not trust could put another directory in the place of ours.

    Sticky is enough here (``/tmp``): what we pass through belongs to people we trust, so nobody else can rename it.
    Raises UntrustedDaemon; FileNotFoundError at the first that is not there, and what is there has been looked at then.
    """
    for passed in _way(directory):
        found = os.lstat(passed)
        if not allowed.admits_uid(found.st_uid):
            what, expected, actual = "belongs to someone we do not trust", _owners(allowed), f"uid {found.st_uid}"
            next_step = f"{_TRUST}, or choose another runtime directory"
        elif stat.S_ISDIR(found.st_mode) and _writable_by_others(found, allowed) and not found.st_mode & stat.S_ISVTX:
            what, expected, actual = "can be written by others", "mode 0755 or tighter", stat.filemode(found.st_mode)
            next_step = f"chmod go-w {passed}, or choose another runtime directory"
        else:
            continue
        raise UntrustedDaemon(
            f"on the way to {directory} something {what}: they could put another directory there",
            expected=expected,
            found=actual,
            where=passed,
            next_step=next_step,
        )


def _way(path: Path) -> Iterator[Path]:
    """Every directory and link that is passed on the way to ``path`` (absolute), in that order, ``path`` left out."""
    here, links = Path("/"), 0
    ahead = [*reversed(path.parts)]
    while len(ahead) > 1:
        part = ahead.pop()
        here = Path("/") if part == "/" else here.parent if part == ".." else here / part
        yield here
        try:
            target = os.readlink(here)
        except OSError:  # not a link
            continue
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        ahead += reversed(Path(target).parts)
        here = here.parent


def _writable_by_others(found: os.stat_result, allowed: AllowList) -> bool:
    return bool(found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid not in allowed.gids))


def check_socket_owner(path: Path, found: os.stat_result, allowed: AllowList) -> None:
    """Refuse a socket file whose owner we do not trust. ``found`` is its ``lstat``. Raises UntrustedDaemon."""
    if not allowed.admits_uid(found.st_uid):
        raise UntrustedDaemon(
            "the socket belongs to someone we do not trust",
            expected=_owners(allowed),
            found=f"uid {found.st_uid}",
            where=path,
            next_step=f"{_TRUST}, or remove the socket if it was planted",
        )


def check_daemon(peer: Peer, path: Path, allowed: AllowList) -> None:
    """Refuse a listening process whose owner we do not trust. Raises UntrustedDaemon."""
    if not allowed.admits_uid(peer.uid):
        raise UntrustedDaemon(
            "the process behind the socket belongs to someone we do not trust",
            expected=_owners(allowed),
            found=str(peer),
            where=path,
            next_step=f"{_TRUST}, or find out who started it",
        )


def _owners(allowed: AllowList) -> str:
    return "uid " + ", ".join(map(str, sorted({0, os.geteuid(), *allowed.uids})))
