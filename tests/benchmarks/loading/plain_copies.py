"""The limit: files copied as they are into fresh memory, in every way known to be fast. No headers, no tensors.

A *segment* is memory that another process can map (a memfd); *private* memory cannot be shared, and is here because
other loaders use it. Each way runs on one or two threads, pieces dealt out as threads become free.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xxhash import xxh3_128

from tests.benchmarks.clock import Clock

PIECE_BYTES = 16 << 20
HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

CopyPiece = Callable[[int, int, int, int], None]
"""(source descriptor, its offset, offset in the fresh memory, bytes)"""


class Segment:
    """A fresh memfd, and, when asked for, a shared mapping of it that begins at a huge page's boundary."""

    def __init__(self, nbytes: int, *, mapped: bool) -> None:
        self.nbytes = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.fd = os.memfd_create("limit", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self.address, self.view = (
            _map_aligned(self.fd, self.nbytes, mmap.MAP_SHARED) if mapped else (0, memoryview(b""))
        )

    def read(self, offset: int, nbytes: int) -> bytes:
        return os.pread(self.fd, nbytes, offset)


class Private:
    """Fresh anonymous memory."""

    def __init__(self, nbytes: int, *, huge: bool) -> None:
        self.nbytes = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.address, self.view = _map_aligned(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge and _libc.madvise(self.address, self.nbytes, mmap.MADV_HUGEPAGE) != 0:
            raise OSError(ctypes.get_errno(), "MADV_HUGEPAGE")

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.view[offset : offset + nbytes])


def _map_aligned(fd: int, nbytes: int, flags: int) -> tuple[int, memoryview]:
    """Mapped for as long as the process lives, at a multiple of the huge page size."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    room = nbytes + HUGE_PAGE_BYTES
    base = _libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if _libc.mmap(address, nbytes, protection, flags | 0x10, fd, 0) != address:  # MAP_FIXED
        raise OSError(ctypes.get_errno(), "mmap")
    return address, memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def segment_sendfile(files: Sequence[str], sample: Sequence[int], threads: int, directory: str) -> dict[str, Any]:
    """``sendfile`` into a segment: in the kernel, nothing is mapped."""
    local = threading.local()

    def copy(source: int, offset: int, at: int, nbytes: int) -> None:
        if not hasattr(local, "fd"):  # a file position of its own
            local.fd = os.open(f"/proc/self/fd/{segment.fd}", os.O_WRONLY | os.O_CLOEXEC)
        os.lseek(local.fd, at, os.SEEK_SET)
        while nbytes:
            sent = os.sendfile(local.fd, source, offset, nbytes)
            offset, nbytes = offset + sent, nbytes - sent

    clock = Clock()
    segment = Segment(_total(files), mapped=False)
    _copy_all(files, copy, threads)
    return _result(clock.read(), segment, files, sample)


def segment_pread(files: Sequence[str], sample: Sequence[int], threads: int, directory: str) -> dict[str, Any]:
    """``pread`` into a mapped segment."""
    clock = Clock()
    segment = Segment(_total(files), mapped=True)
    _copy_all(files, _into(segment.view), threads)
    return _result(clock.read(), segment, files, sample)


def segment_pwrite(files: Sequence[str], sample: Sequence[int], threads: int, directory: str) -> dict[str, Any]:
    """``pwrite`` into a segment from the mapped file."""
    clock = Clock()
    segment = Segment(_total(files), mapped=False)
    sources: dict[int, memoryview] = {}

    def copy(source: int, offset: int, at: int, nbytes: int) -> None:
        if source not in sources:
            sources[source] = memoryview(mmap.mmap(source, 0, prot=mmap.PROT_READ))
        view = sources[source]
        while nbytes:
            written = os.pwrite(segment.fd, view[offset : offset + nbytes], at)
            offset, at, nbytes = offset + written, at + written, nbytes - written

    _copy_all(files, copy, threads)
    return _result(clock.read(), segment, files, sample)


def segment_huge_pread(files: Sequence[str], sample: Sequence[int], threads: int, directory: str) -> dict[str, Any]:
    """``pread`` into a mapped segment whose pages are first made huge ones, by MADV_COLLAPSE (Linux 6.1).

    It works whatever ``shmem_enabled`` says, except ``deny``, but not on nothing: each huge page needs one small page.
    """
    clock = Clock()
    segment = Segment(_total(files), mapped=True)
    prepared: set[int] = set()
    refused: list[str] = []

    def prepare(at: int) -> None:
        """Of the whole piece at once: each call makes every processor empty its list of new pages."""
        first = at // PIECE_BYTES * PIECE_BYTES
        if first in prepared:
            return
        prepared.add(first)  # two files that meet in a piece may both prepare it, which costs little
        end = min(first + PIECE_BYTES, segment.nbytes)
        for page in range(first, end, HUGE_PAGE_BYTES):
            os.pwrite(segment.fd, b"\0", page)
        for _ in range(3):
            if _libc.madvise(segment.address + first, end - first, _MADV_COLLAPSE) == 0:
                return
            if ctypes.get_errno() != errno.EAGAIN:  # a page was busy for a moment
                break
        refused.append(os.strerror(ctypes.get_errno()))  # these stay small pages: slower, not wrong

    fill = _into(segment.view)

    def copy(source: int, offset: int, at: int, nbytes: int) -> None:
        prepare(at)
        fill(source, offset, at, nbytes)

    _copy_all(files, copy, threads)
    return {**_result(clock.read(), segment, files, sample), "pieces_of_small_pages": refused}


def private_pread(files: Sequence[str], sample: Sequence[int], threads: int, directory: str) -> dict[str, Any]:
    """``pread`` into private memory of ordinary pages."""
    clock = Clock()
    memory = Private(_total(files), huge=False)
    _copy_all(files, _into(memory.view), threads)
    return _result(clock.read(), memory, files, sample)


def private_huge_pread(files: Sequence[str], sample: Sequence[int], threads: int, directory: str) -> dict[str, Any]:
    """``pread`` into private memory of huge pages."""
    clock = Clock()
    memory = Private(_total(files), huge=True)
    _copy_all(files, _into(memory.view), threads)
    return _result(clock.read(), memory, files, sample)


def _into(view: memoryview) -> CopyPiece:
    def copy(source: int, offset: int, at: int, nbytes: int) -> None:
        while nbytes:
            got = os.preadv(source, [view[at : at + nbytes]], offset)
            offset, at, nbytes = offset + got, at + got, nbytes - got

    return copy


def _total(files: Sequence[str]) -> int:
    return sum(os.stat(file).st_size for file in files)


def _copy_all(files: Sequence[str], copy: CopyPiece, threads: int) -> None:
    """Every file after the other, in pieces that end at multiples of the piece size *of the memory*."""
    sources = [os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in files]
    pieces = iter(list(_pieces(sources)))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for piece in iter(lambda: next(pieces, None), None):  # one bytecode under the GIL: no piece twice
                copy(*piece)
        except BaseException as error:  # noqa: BLE001 (raised again below, in the main thread)
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


def _pieces(sources: Sequence[int]) -> itertools.chain[tuple[int, int, int, int]]:
    def of_file(source: int, start: int, nbytes: int) -> list[tuple[int, int, int, int]]:
        pieces, at, end = [], start, start + nbytes
        while at < end:
            stop = min(end, (at // PIECE_BYTES + 1) * PIECE_BYTES)
            pieces.append((source, at - start, at, stop - at))
            at = stop
        return pieces

    sizes = [os.fstat(source).st_size for source in sources]
    starts = itertools.accumulate(sizes, initial=0)
    return itertools.chain.from_iterable(
        of_file(source, start, nbytes) for source, start, nbytes in zip(sources, starts, sizes, strict=False)
    )


def _result(
    taken: Mapping[str, float], memory: Segment | Private, files: Sequence[str], sample: Sequence[int]
) -> dict[str, Any]:
    """``sample`` is (number of the file, offset, bytes) of one tensor."""
    number, offset, nbytes = sample
    before = _total(files[:number])
    digest = xxh3_128(memory.read(before + offset, nbytes)).hexdigest()
    return {**taken, "nbytes": _total(files), "sample": digest}
