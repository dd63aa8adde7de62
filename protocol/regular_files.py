"""Opening files of a directory that somebody else made: regular files only, and nothing there can keep us waiting.

A checkpoint comes from anywhere: what is called ``config.json`` may be a FIFO, a device, or a directory. Links are
followed (hub caches are links). Used by whoever reads a checkpoint's files.
"""

from __future__ import annotations

import errno
import os
import stat


class NotRegularError(OSError):
    """Something else than a regular file. ``mode`` is its mode."""

    def __init__(self, path: str, mode: int) -> None:
        super().__init__(errno.EINVAL, f"not a regular file ({stat.filemode(mode)[0]!r})", path)
        self.mode = mode


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A close-on-exec descriptor of the regular file at ``path``, the caller's. Raises OSError; waits for nobody.

    ``O_NONBLOCK`` only keeps ``open`` itself from waiting for ever on a FIFO; it is taken off again. Can be the
    ``opener`` of Python's ``open``.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise NotRegularError(os.fspath(path), mode)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd
