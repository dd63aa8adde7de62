"""Owns asking the kernel to forget files, and how much of them it still holds. Only the demo calls it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def drop(files: Iterable[Path]) -> float:
    """Writes the files back and asks the kernel to drop their pages. Returns the fraction of them that it kept.

    Nothing else is dropped, so no privilege is needed. Pages that some process has mapped stay, and so does everything
    on a file system that is memory itself (tmpfs).
    """
    files = list(files)
    for file in files:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return cached_fraction(files)


def cached_fraction(files: Iterable[Path]) -> float:
    """Pages of the files that are in the page cache, over all their pages: 0 (cold) to 1 (warm)."""
    held = total = 0
    for file in files:
        size = file.stat().st_size
        if size:
            pages = -(-size // mmap.PAGESIZE)
            total += pages
            held += _cached_pages(file, size, pages)
    return held / total if total else 1.0


def _cached_pages(file: Path, size: int, pages: int) -> int:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap", str(file))
    try:
        states = ctypes.create_string_buffer(pages)
        if _libc.mincore(address, size, states) != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(file))
        return sum(state & 1 for state in states.raw[:pages])
    finally:
        _libc.munmap(address, size)
