"""Memory kind ``host``: a segment is a memfd, handed over as a descriptor and protected by seals.

Owns allocation, sealing, export, verification and mapping of segments (and of the manifest, which travels the same
way). The daemon allocates, seals and exports; the worker maps shared to fill; the client verifies and maps privately.

What the kernel promises once :func:`seal` has succeeded: nobody, root included, can write to, resize or punch holes
into the memory through any descriptor or a new mapping, and no writable shared mapping exists. A reader's private
mapping is copy-on-write: what it writes stays in its own pages. The memory lives while any descriptor or mapping of it
does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import weakref

from weightcached.protocol.errors import InsufficientMemory, TransferError
from weightcached.protocol.memory.admission import admit as admit  # part of a kind, measured there

# Not in Python 3.11's modules: linux/memfd.h, linux/mman.h.
_MFD_NOEXEC_SEAL = 0x0008
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MADV_POPULATE_READ = 22
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

dies_with_holder = False
"""A descriptor alone keeps the memory."""

LARGE_PAGE_NBYTES = 2 << 20
"""Mappings of at least this size begin at a multiple of it: large pages of the segment are then mapped as such."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def resident_nbytes(nbytes: int) -> int:
    """What a segment of ``nbytes`` takes of the memory, once all of it is written: pages are not counted up to."""
    return nbytes


def allocate(nbytes: int, *, name: str) -> int:
    """A new memfd of ``nbytes`` zero bytes that may still be written. The caller owns the descriptor.

    Pages are taken from the system when they are written, not here. ``name`` shows in ``/proc/*/maps``.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)  # Linux before 6.3 does not know the flag
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise InsufficientMemory("cannot size a segment", expected=f"{nbytes} bytes", found=error.strerror) from error
    return fd


def seal(fd: int) -> None:
    """Make the memory immutable for everybody. Raises BlockingIOError (EBUSY) while a writable shared mapping lives."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise BlockingIOError(error.errno, "a writable mapping of the segment is still alive") from error
        raise


def export(fd: int) -> int:
    """A read-only descriptor of the same memory, for handing to others. The caller owns it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def verify(fd: int, *, nbytes: int, what: str, read_only: bool = False) -> None:
    """Refuse a received descriptor that is not sealed memory of exactly ``nbytes``, or with ``read_only`` is not opened
    for reading only: TransferError naming ``what``.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise TransferError(f"{what} is not memory", expected="a memfd", found=stat.filemode(found.st_mode))
    access = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_PATH)
    if access not in (os.O_RDONLY, os.O_RDWR):
        raise TransferError(f"{what} cannot be read through its descriptor", expected="one opened for reading")
    if found.st_size != nbytes:
        raise TransferError(f"{what} has another size than announced", expected=nbytes, found=found.st_size)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransferError(f"{what} cannot be sealed", expected="a memfd", found=error.strerror) from error
    missing = SEALS & ~seals
    if missing:
        raise TransferError(f"{what} lacks seals: its bytes could change", expected=hex(SEALS), found=hex(seals))
    if read_only and access != os.O_RDONLY:
        raise TransferError(f"{what} came open for writing", expected="a read-only descriptor", found="read and write")


class Mapping:
    """A mapped segment: ``address`` and ``nbytes``. Unmapped when closed, or when the last reference to it goes.

    Whoever hands out memory of it (a tensor, a view) keeps a reference, so that the memory outlives them all. Python's
    own ``mmap`` keeps a duplicate of the descriptor, and with it the memory, for as long as the mapping lives; this
    does not.
    """

    def __init__(self, fd: int, *, nbytes: int, protection: int, flags: int) -> None:
        self.nbytes = self.resident_nbytes = nbytes
        try:
            self.address = _mapped(fd, max(nbytes, 1), protection, flags)
        except OSError as error:
            raise TransferError(
                "cannot map a segment",
                expected=f"{nbytes} bytes of address space",
                found=error.strerror,
                next_step="check limits on address space (ulimit -v) and memory of this process",
            ) from error
        self._unmap = weakref.finalize(self, _libc.munmap, ctypes.c_void_p(self.address), max(nbytes, 1))
        self._unmap.atexit = False

    def close(self) -> None:
        """Unmap now. Any view that still points here is invalid from now on. Safe to call twice."""
        self._unmap()

    @property
    def closed(self) -> bool:
        return not self._unmap.alive

    def revert(self) -> None:
        """Of a private mapping: give up the pages of its own, so that it shows the segment's bytes again."""
        if self.closed:
            raise ValueError("the mapping was closed")
        if _libc.madvise(self.address, max(self.nbytes, 1), mmap.MADV_DONTNEED):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def populate(self) -> None:
        """Have the kernel enter every page into this process's page table, as reading each would. Blocks."""
        if not self.nbytes or _libc.madvise(self.address, self.nbytes, _MADV_POPULATE_READ) == 0:
            return
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # that is Linux before 5.14, which does not know the advice
            raise TransferError("cannot enter a segment's pages into the page table", found=os.strerror(number))
        bytes(self.view()[:: mmap.PAGESIZE])

    def view(self) -> memoryview:
        """The mapped bytes; keeps the mapping alive. Writable: of a read-only mapping, a write kills the process."""
        if self.closed:
            raise ValueError("the mapping was closed")
        if not self.nbytes:
            return memoryview(bytearray())  # ctypes and memoryview disagree about empty arrays
        block = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        block.owner = self  # type: ignore[attr-defined]  # ctypes arrays take attributes; this one holds the mapping
        return memoryview(block).cast("B")


def _mapped(fd: int, nbytes: int, protection: int, flags: int) -> int:
    """The address of a new mapping, aligned where it can hold a large page. Raises OSError."""
    if nbytes < LARGE_PAGE_NBYTES:
        return _mmap(None, nbytes, protection, flags, fd)
    # The kernel aligns mappings only where its switches favour large pages: take more room than needed, and trim it.
    room = nbytes + LARGE_PAGE_NBYTES
    base = _mmap(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    try:
        address = _mmap(-(-base // LARGE_PAGE_NBYTES) * LARGE_PAGE_NBYTES, nbytes, protection, flags | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(base, room)
        raise
    end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    for start, stop in ((base, address), (end, base + room)):
        if stop > start:
            _libc.munmap(start, stop - start)
    return address


def _mmap(wanted: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    address: int = _libc.mmap(wanted, nbytes, protection, flags, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def map_private(fd: int, *, nbytes: int) -> Mapping:
    """Map for an engine: readable and writable, its writes going to private pages; no swap is reserved for them."""
    return Mapping(
        fd, nbytes=nbytes, protection=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE
    )


def map_shared(fd: int, *, nbytes: int) -> Mapping:
    """Map for the worker that fills the segment. :func:`seal` fails while it lives."""
    return Mapping(fd, nbytes=nbytes, protection=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_SHARED)


def map_readonly(fd: int, *, nbytes: int) -> Mapping:
    """Map for a reader that only looks: the manifest, a digest check."""
    return Mapping(fd, nbytes=nbytes, protection=mmap.PROT_READ, flags=mmap.MAP_SHARED)
