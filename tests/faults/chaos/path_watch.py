"""Whether a socket file was ever absent, told by the kernel: no instant is missed, as looking in a loop would.

Owns an inotify descriptor. A rename over the file replaces it and is fine; a removal, or a rename of it to another
name, is an absence.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_IN_MOVED_FROM = 0x40
_IN_DELETE = 0x200
_IN_Q_OVERFLOW = 0x4000
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class PathWatch:
    """Watches the folders of files from when they are added."""

    def __init__(self) -> None:
        self._fd: int = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._paths: dict[tuple[int, str], Path] = {}

    def add(self, path: Path) -> None:
        watch = _libc.inotify_add_watch(self._fd, os.fsencode(path.parent), _IN_MOVED_FROM | _IN_DELETE)
        if watch < 0:
            raise OSError(ctypes.get_errno(), f"inotify_add_watch {path.parent}")
        self._paths[watch, path.name] = path

    def absences(self) -> list[Path]:
        """Paths that became absent since the last call, in order."""
        found = []
        while data := self._read():
            offset = 0
            while offset < len(data):
                watch, mask, _, nbytes = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size
                name = data[offset : offset + nbytes].rstrip(b"\0").decode()
                offset += nbytes
                if mask & _IN_Q_OVERFLOW:
                    raise OSError("inotify lost events")
                if (watch, name) in self._paths:
                    found.append(self._paths[watch, name])
        return found

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 65536)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self._fd)
