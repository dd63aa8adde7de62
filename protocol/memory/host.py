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

from weightcached.protocol.errors import InsufficientMemory, SwapFailed, SwapRefused, TransferError
from weightcached.protocol.memory.admission import admit as admit  # part of a kind, measured there
from weightcached.protocol.memory.giving_up import ClosedAfterwards
from weightcached.protocol.memory.private_pages import private_extents

# Not in Python 3.11's modules: linux/memfd.h, linux/mman.h.
_MFD_NOEXEC_SEAL = 0x0008
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MADV_POPULATE_READ = 22
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_MREMAP_DONTUNMAP = 4
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

dies_with_holder = False
"""A descriptor alone keeps the memory."""

LARGE_PAGE_NBYTES = 2 << 20
"""Mappings of at least this size begin at a multiple of it: large pages of the segment are then mapped as such."""

segment_max_nbytes: int | None = None
"""A memfd may be as large as there is memory."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


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


class Mapping(ClosedAfterwards):
    """A mapped segment: ``address`` and ``nbytes``. Unmapped when closed, or when the last reference to it goes.

    Whoever hands out memory of it (a tensor, a view) keeps a reference, so that the memory outlives them all. Python's
    own ``mmap`` keeps a duplicate of the descriptor, and with it the memory, for as long as the mapping lives; this
    does not.
    """

    def __init__(self, fd: int, *, nbytes: int, protection: int, flags: int) -> None:
        self.nbytes = self.resident_nbytes = nbytes
        try:
            self._at = _At(_mapped(fd, max(nbytes, 1), protection, flags))
        except OSError as error:
            raise TransferError(
                "cannot map a segment",
                expected=f"{nbytes} bytes of address space",
                found=error.strerror,
                next_step="check limits on address space (ulimit -v) and memory of this process",
            ) from error
        self._unmap = weakref.finalize(self, _unmap, self._at, max(nbytes, 1))
        self._unmap.atexit = False

    @property
    def address(self) -> int:
        return self._at.address

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

    def exchange(self, other: Mapping) -> None:
        """Show here what ``other`` shows, and there what this one does, private pages included. Nothing is copied, and
        where both are large enough to be aligned, page tables move whole: half a millisecond for a GiB.

        This address stays, and with it every tensor and view. ``other`` gets another address, so nobody may have a view
        of it. Nobody may touch either meanwhile: a reader would see both generations in turn. SwapRefused for another
        size. SwapFailed where the kernel refuses: both are then what they were, unless it says otherwise.
        """
        if self.closed or other.closed:
            raise ValueError("the mapping was closed")
        if self.nbytes != other.nbytes:
            raise SwapRefused("segments of other sizes", expected=f"{self.nbytes} bytes", found=f"{other.nbytes} bytes")
        nbytes = max(self.nbytes, 1)
        try:
            aside = _reserved(nbytes)
        except OSError as error:
            raise _not_moved(error, "there are no addresses to put a segment aside") from error
        try:
            # The range stays mapped, empty, until the next move takes its place: were it a hole, another thread's new
            # mapping could come to lie in it, and be overwritten.
            _move(self.address, nbytes, aside, _MREMAP_DONTUNMAP)
        except OSError as error:
            _libc.munmap(aside, nbytes)
            raise _not_moved(error, "a segment cannot be moved aside") from error
        try:
            _move(other.address, nbytes, self.address)
        except OSError as error:
            raise self._put_back(aside, nbytes, error) from error
        other._at.address = aside

    def written(self) -> list[tuple[int, int]]:
        """Of a private mapping: the pages that this process wrote to. About 20 ms for a GiB."""
        if self.closed:
            raise ValueError("the mapping was closed")
        return private_extents(self.address, self.nbytes)

    def settle(self) -> None:
        """Nothing to wait for: who computes here is a thread, and barriers stop threads."""

    def _put_back(self, aside: int, nbytes: int, failure: OSError) -> SwapFailed:
        """The error of a second move that failed, once the first is undone."""
        try:
            _move(aside, nbytes, self.address)
        except OSError as error:
            return SwapFailed(
                "a segment was moved aside, and neither the new one nor itself could be moved to its address",
                expected=f"{nbytes} bytes at {self.address:#x}",
                found=f"{failure.strerror}, then {error.strerror}",
                next_step="the weights in use are not valid any more: end this process",
                intact=False,
            )
        return _not_moved(failure, "the new segment cannot be moved in")

    def view(self) -> memoryview:
        """The mapped bytes; keeps the mapping alive. Writable: of a read-only mapping, a write kills the process."""
        if self.closed:
            raise ValueError("the mapping was closed")
        if not self.nbytes:
            return memoryview(bytearray())  # ctypes and memoryview disagree about empty arrays
        block = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        block.owner = self  # type: ignore[attr-defined]  # ctypes arrays take attributes; this one holds the mapping
        return memoryview(block).cast("B")


class _At:
    """Where a mapping is: what its finalizer has to know, outside the object that it is of."""

    def __init__(self, address: int) -> None:
        self.address = address


def _unmap(at: _At, nbytes: int) -> None:
    _libc.munmap(at.address, nbytes)


def _mapped(fd: int, nbytes: int, protection: int, flags: int) -> int:
    """The address of a new mapping, aligned where it can hold a large page. Raises OSError."""
    if nbytes < LARGE_PAGE_NBYTES:
        return _mmap(None, nbytes, protection, flags, fd)
    address = _reserved(nbytes)
    try:
        return _mmap(address, nbytes, protection, flags | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(address, nbytes)
        raise


def _reserved(nbytes: int) -> int:
    """Addresses where nothing is and nobody else's mapping will lie, aligned as mappings are. Raises OSError."""
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    if nbytes < LARGE_PAGE_NBYTES:
        return _mmap(None, nbytes, _PROT_NONE, nothing, -1)
    # The kernel aligns mappings only where its switches favour large pages: take more room than needed, and trim it.
    room = nbytes + LARGE_PAGE_NBYTES
    base = _mmap(None, room, _PROT_NONE, nothing, -1)
    address = -(-base // LARGE_PAGE_NBYTES) * LARGE_PAGE_NBYTES
    end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    for start, stop in ((base, address), (end, base + room)):
        if stop > start:
            _libc.munmap(start, stop - start)
    return address


def _move(address: int, nbytes: int, to: int, keep: int = 0) -> None:
    """Move a mapping over whatever is at ``to``. Raises OSError."""
    if _libc.mremap(address, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED | keep, to) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _not_moved(error: OSError, message: str) -> SwapFailed:
    return SwapFailed(
        f"{message}; the weights in use are what they were",
        expected="mremap with MREMAP_DONTUNMAP, of Linux 5.13 or newer",
        found=error.strerror,
        next_step="check limits on address space (ulimit -v) and mappings (vm.max_map_count) of this process",
    )


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
