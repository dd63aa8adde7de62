"""The notify socket: where the keeper's datagrams arrive, each with the kernel's word for who sent it.

Owns the socket, its private directory, and every received descriptor until somebody takes it. Understands nothing of
what a datagram says. It is a path in a directory of mode 0700: an abstract name could be flooded by any user.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from weightcached.daemon.notify_protocol import DATAGRAM_MAX_BYTES, DESCRIPTORS_MAX, socket_address
from weightcached.protocol.errors import InvalidEnvironment
from weightcached.protocol.fds import OwnedFds

_PREFIX = "weightcached-supervisor-"
_SOCKET = "notify"
_CREDENTIALS = struct.Struct("3i")
_FD_NBYTES = array.array("i").itemsize
_CONTROL_NBYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(DESCRIPTORS_MAX * _FD_NBYTES)


@dataclass(frozen=True, slots=True)
class Datagram:
    """One datagram. Whoever gets it closes ``fds`` or takes them."""

    sender_pid: int
    """As seen from here, and as it was when the datagram was sent; 0 for a process outside our PID namespace."""
    data: bytes
    fds: OwnedFds
    cut: bool
    """Bytes or descriptors were lost on the way: too many of them, or no room for descriptors in this process."""


class Mailbox:
    """A bound notify socket at ``path``."""

    def __init__(self, parent: Path) -> None:
        """Make a directory of our own in ``parent`` and bind in it. Raises InvalidEnvironment.

        Those that killed supervisors of this user left in ``parent`` are removed.
        """
        self._directory = parent / f"{_PREFIX}{os.urandom(8).hex()}"
        self.path = self._directory / _SOCKET
        socket_address(str(self.path.absolute()))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            # Before there is an address: a datagram that was sent earlier would come without credentials.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            _sweep(parent)
            self._directory.mkdir(mode=0o700)
            self._socket.bind(str(self.path))
        except OSError as error:
            self.close()
            raise InvalidEnvironment(
                "cannot put a notify socket there",
                found=error.strerror,
                where=self.path,
                next_step="let TMPDIR name a directory that this user can write to",
            ) from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Datagram | None:
        """The next datagram, or None when there is none now. Does not block."""
        try:
            data, control, flags, _ = self._socket.recvmsg(
                DATAGRAM_MAX_BYTES, _CONTROL_NBYTES, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        pid, fds = 0, OwnedFds()
        for level, kind, payload in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % _FD_NBYTES])
                for fd in numbers:
                    fds.append(fd)
            elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid, _, _ = _CREDENTIALS.unpack(payload)
        return Datagram(pid, data, fds, cut=bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)))

    def close(self) -> None:
        """Close, and remove the socket and its directory. Safe to call twice."""
        self._socket.close()
        with contextlib.suppress(OSError):  # what cannot be removed (a read-only file system) the next one sweeps away
            self.path.unlink(missing_ok=True)
            self._directory.rmdir()


def _sweep(parent: Path) -> None:
    """Remove the directories of supervisors that are dead: nobody is bound to the socket any more.

    Only what nobody but this user can have made or changed is touched, whatever else is called like it. One without a
    socket is left alone: its supervisor may be about to bind.
    """
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            found = directory.lstat()
        except FileNotFoundError:  # its supervisor has just ended
            continue
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            continue
        path = directory / _SOCKET
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # another that starts now was faster, or something else is in it
                    directory.rmdir()
