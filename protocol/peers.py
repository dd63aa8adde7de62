"""Who is at the other end, and whether to trust a path before speaking through it.

Owns peer credentials (``SO_PEERCRED``), the allow-list of user and group ids, and the checks on the runtime directory
and socket file. Both sides use the same checks: a daemon on its clients and its own directory, a client on its daemon.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from weightcached.protocol.errors import UntrustedDaemon

_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected or listened, as the kernel recorded it at that moment."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"pid {self.pid}, uid {self.uid}, gid {self.gid}"


def peer_of(connection: socket.socket) -> Peer:
    """Credentials of the peer of a connected Unix socket. The pid is 0 when it lives outside our PID namespace."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid, gid)


@dataclass(frozen=True, slots=True)
class AllowList:
    """User and group ids trusted beside root and ourselves."""

    uids: Collection[int] = field(default_factory=frozenset)
    gids: Collection[int] = field(default_factory=frozenset)

    def admits_uid(self, uid: int) -> bool:
        return uid in (0, os.geteuid()) or uid in self.uids

    def admits(self, peer: Peer) -> bool:
        return self.admits_uid(peer.uid) or peer.gid in self.gids


def check_directory(directory: Path, allowed: AllowList) -> None:
    """Refuse a directory that others can write to, or that somebody we do not trust owns: they could swap the socket.

    A sticky directory protects entries only from people who do not own it, so it counts as writable. Group-writable is
    refused unless the group is allowed. Symbolic links at ``directory`` itself are not followed.
    Raises UntrustedDaemon; FileNotFoundError passes through.
    """
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
            next_step="allow that uid explicitly, or choose another runtime directory",
        )
    writable_by_group = found.st_mode & stat.S_IWGRP and found.st_gid not in allowed.gids
    if found.st_mode & stat.S_IWOTH or writable_by_group:
        raise UntrustedDaemon(
            "others can write to the directory, so anybody could have put a socket there",
            expected="mode 0755 or tighter",
            found=stat.filemode(found.st_mode),
            where=where,
            next_step=f"chmod go-w {directory}",
        )


def check_socket_owner(path: Path, found: os.stat_result, allowed: AllowList) -> None:
    """Refuse a socket file whose owner we do not trust. ``found`` is its ``lstat``. Raises UntrustedDaemon."""
    if not allowed.admits_uid(found.st_uid):
        raise UntrustedDaemon(
            "the socket belongs to someone we do not trust",
            expected=_owners(allowed),
            found=f"uid {found.st_uid}",
            where=path,
            next_step="allow that uid explicitly, or remove the socket if it was planted",
        )


def check_daemon(peer: Peer, path: Path, allowed: AllowList) -> None:
    """Refuse a listening process whose owner we do not trust. Raises UntrustedDaemon."""
    if not allowed.admits_uid(peer.uid):
        raise UntrustedDaemon(
            "the process behind the socket belongs to someone we do not trust",
            expected=_owners(allowed),
            found=str(peer),
            where=path,
            next_step="allow that uid explicitly, or find out who started it",
        )


def _owners(allowed: AllowList) -> str:
    return "uid " + ", ".join(map(str, sorted({0, os.geteuid(), *allowed.uids})))
