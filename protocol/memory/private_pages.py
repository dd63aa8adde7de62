"""Which pages of a private mapping are this process's own: those that it wrote to, whatever it wrote.

Owns reading ``/proc/self/pagemap`` for that. The kernel keeps no count of them: looking goes through every page, about
20 ms for a GiB of small ones, so nobody looks where others wait.
"""

from __future__ import annotations

import mmap
import os
import re

_ENTRY_NBYTES = 8
_PAGES_AT_ONCE = 1 << 16
_PRESENT, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
"""Bits 63, 62 and 61 of an entry, in its last byte. A page that is not of the file, or was swapped out, is private."""
_IS_PRIVATE = bytes(int(bool(top & _SWAPPED) or top & (_PRESENT | _OF_FILE) == _PRESENT) for top in range(256))
_RUNS = re.compile(rb"\x01+")


def private_extents(address: int, nbytes: int) -> list[tuple[int, int]]:
    """[start, stop) of each run of private pages, in bytes from ``address``, the last not cut to ``nbytes``.

    ``address`` is a page's. Raises OSError where the kernel does not tell.
    """
    first, count = address // mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE)
    extents: list[tuple[int, int]] = []
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for page in range(0, count, _PAGES_AT_ONCE):
            asked = min(_PAGES_AT_ONCE, count - page) * _ENTRY_NBYTES
            entries = os.pread(fd, asked, (first + page) * _ENTRY_NBYTES)
            if len(entries) != asked:
                raise OSError("/proc/self/pagemap ended early")
            for run in _RUNS.finditer(entries[_ENTRY_NBYTES - 1 :: _ENTRY_NBYTES].translate(_IS_PRIVATE)):
                start, stop = ((page + end) * mmap.PAGESIZE for end in run.span())
                if extents and extents[-1][1] == start:
                    start = extents.pop()[0]
                extents.append((start, stop))
    finally:
        os.close(fd)
    return extents
