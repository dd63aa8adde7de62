"""Making files cold or warm in the page cache, and seeing that they are. Works on whole files, by path.

Cold means: not in this kernel's page cache. What a hypervisor or a disk keeps is out of reach, which is why contenders
take turns within one run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class NotCold(RuntimeError):
    """The page cache keeps what it was asked to drop: a file system in memory, or pages somebody has mapped."""


def resident_pages(path: Path) -> bytes:
    """One byte per page of the file; its lowest bit says whether the page is in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        nbytes = os.fstat(fd).st_size
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        try:
            pages = ctypes.create_string_buffer(-(-nbytes // PAGE_BYTES))
            if _libc.mincore(address, nbytes, pages) != 0:
                raise OSError(ctypes.get_errno(), "mincore")
            return pages.raw[: -(-nbytes // PAGE_BYTES)].translate(_LOWEST_BIT)
        finally:
            _libc.munmap(address, nbytes)
    finally:
        os.close(fd)


_LOWEST_BIT = bytes(value & 1 for value in range(256))


def resident_share(paths: Iterable[Path]) -> float:
    """Which part of the files' pages is in the page cache, 0 to 1."""
    found = [resident_pages(path) for path in paths]
    return sum(map(sum, found)) / max(1, sum(map(len, found)))


def make_cold(paths: Iterable[Path], *, tolerated: float = 0.005) -> None:
    """Writes the files back and drops their pages. Raises NotCold when more than ``tolerated`` of them stay."""
    paths = list(paths)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    share = resident_share(paths)
    if share > tolerated:
        raise NotCold(f"{share:.1%} of the files' pages stay in the page cache; --dir names another file system")


def make_warm(paths: Iterable[Path]) -> None:
    """Reads the files once, so that every page is in the page cache unless memory is short."""
    buffer = bytearray(8 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
