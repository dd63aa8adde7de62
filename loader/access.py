"""Access: one way each in which bytes of an open file come into buffers, and what is known of a file before.

Owns the system calls of the four strategies. Opens nothing of its own accord but second descriptors of files it was
given. Thread-safe. What is read, and in which pieces, is `reading.py`'s; which way is taken is `strategy.py`'s.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from weightcached.loader.reading import VECTORS_MAX, Access, Extent
from weightcached.loader.strategy import FileFacts, Strategy
from weightcached.protocol.errors import DeploymentError
from weightcached.protocol.filesystems import file_system_of
from weightcached.protocol.memory.host import LARGE_PAGE_NBYTES

WINDOW_NBYTES = 128 << 10
"""Linux's usual window for reading ahead. Of more than fits into a file's, an advice is cut short without a word; where
many small ones are given instead, a disk gets many small requests."""

DIRECT_NBYTES = LARGE_PAGE_NBYTES
"""What is read past the page cache at a time, into a large page: of small ones a disk is told one by one, and takes
half as long again. From a multiple of it in the file, or a disk needs some percent longer."""

_DIRECT_UNIT_NBYTES = 4096
"""Where such a read may begin and end, in any file system."""

_SMALL_NBYTES = 64 << 10
_BEGIN_NBYTES = 4 << 20
"""The kernel reads about twice as far ahead of a first read, and further with each that follows."""
_CACHESTAT = 451
"""The system call's number on every architecture (Linux 6.5)."""
_NO_ADVICE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE})

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def accessing(files: Mapping[str, int], strategy: Strategy, *, mapped: bool) -> Iterator[Access]:
    """The way that the strategy names, to ``files`` (name → descriptor), by ``mapped`` files too where that is faster.
    Raises DeploymentError where a file cannot be read that way.
    """
    with ExitStack() as stack:
        if strategy.name == "direct":
            direct = Direct(files)
            stack.callback(direct.close)
            yield direct
        elif strategy.name == "mmap":
            yield Mapped(files)
        else:
            buffered = Buffered(files, strategy.exact, apart=strategy.apart, mapped=mapped)
            stack.callback(buffered.close)
            yield buffered


def look(files: Mapping[str, int]) -> dict[str, FileFacts]:
    """What is known of each file, by a few system calls. Reads no byte from a disk."""
    return {name: _facts(fd) for name, fd in files.items()}


def _facts(fd: int) -> FileFacts:
    try:
        os.close(_reopened(fd, os.O_DIRECT))
        direct = True
    except OSError:
        direct = False
    nbytes = os.fstat(fd).st_size
    return FileFacts(nbytes, file_system_of(fd), _cached_nbytes(fd) / nbytes if nbytes else 1.0, direct)


class Buffered:
    """Through the page cache."""

    def __init__(
        self, files: Mapping[str, int], exact: Container[str] = (), *, apart: bool = False, mapped: bool = False
    ) -> None:
        """``exact`` names the files of which nothing may be read ahead but what :meth:`expect` is told of. ``apart``:
        threads read the others at places of their own, so each gets a descriptor of its own, and with it the kernel's
        reading ahead. ``mapped``: what lies in the page cache may be looked at in mappings of the files, which a file
        that becomes shorter meanwhile turns into a signal (SIGBUS).
        """
        self._files = files
        self._exact = exact
        self._windows = {name: _window_nbytes(fd) for name, fd in files.items()}
        for name, fd in files.items():
            _advise(fd, 0, 0, os.POSIX_FADV_RANDOM if name in exact else os.POSIX_FADV_SEQUENTIAL)
        self._apart = apart
        self._may_map = mapped
        self._mappings: Mapped | None = None
        self._local = threading.local()
        self._opened: set[int] = set()
        self._unseen = memoryview(bytearray(_BEGIN_NBYTES))
        """What is read to begin with lands here, in vain where it is there already."""

    def expect(self, file: str, offset: int, nbytes: int) -> None:
        """Fills the page cache with these bytes of an exact file, unless they are there."""
        fd = self._files[file]
        if file not in self._exact or _is_cached(fd, offset + nbytes - 1):
            return
        window = self._windows[file]
        for start in range(offset, offset + nbytes, window):
            _advise(fd, start, min(window, offset + nbytes - start), os.POSIX_FADV_WILLNEED)

    def begin(self, extents: Iterator[Extent]) -> None:
        """Has the disk start, where threads wait for it: a read that must not wait leaves its readahead under way."""
        first = next(extents, None) if self._apart else None
        if first is not None and first.file not in self._exact:
            with suppress(OSError):  # not there yet; a real fault shows when it is read
                os.preadv(self._descriptor(first.file), [self._unseen[: first.nbytes]], first.offset, os.RWF_NOWAIT)

    def fill(self, file: str, buffers: Sequence[memoryview], offset: int) -> None:
        fd, wanted = self._descriptor(file), sum(map(len, buffers))
        done = os.preadv(fd, buffers, offset)
        while done < wanted:
            more = os.preadv(fd, list(_unfilled(buffers, done))[:VECTORS_MAX], offset + done)
            if not more:
                raise EOFError(done)
            done += more

    def view(self, file: str, offset: int, nbytes: int) -> memoryview | None:
        if not self._may_map or not _is_cached(self._files[file], offset + nbytes - 1):
            return None
        if self._mappings is None:
            self._mappings = Mapped(self._files)  # by two threads at once, perhaps: one of them is dropped
        return self._mappings.view(file, offset, nbytes)

    def _descriptor(self, file: str) -> int:
        """To read the file by. A thread has one of its own at a time: of the file that it has read last."""
        if not self._apart or file in self._exact:
            return self._files[file]
        if getattr(self._local, "file", None) != file:
            self._close_own()
            try:
                fd = _reopened(self._files[file])
            except OSError:  # not allowed, or no more to be had: threads share one, which is slower, not wrong
                return self._files[file]
            _advise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._opened.add(fd)
            self._local.file, self._local.fd = file, fd
        own: int = self._local.fd
        return own

    def _close_own(self) -> None:
        if getattr(self._local, "file", None) is not None:
            self._local.file = None
            self._opened.discard(self._local.fd)
            os.close(self._local.fd)

    def close(self) -> None:
        """Close all that was opened here. No thread may read any more."""
        while self._opened:
            os.close(self._opened.pop())


class Mapped:
    """Out of mappings of the files, which last as long as this. A file that becomes shorter meanwhile kills the process
    (SIGBUS), so this is for workers.
    """

    def __init__(self, files: Mapping[str, int]) -> None:
        self._views = {name: _mapped(fd) for name, fd in files.items()}

    def expect(self, file: str, offset: int, nbytes: int) -> None:
        """Nothing: the kernel reads ahead of the faults."""

    def begin(self, extents: Iterator[Extent]) -> None:
        """Nothing, for the same reason."""

    def fill(self, file: str, buffers: Sequence[memoryview], offset: int) -> None:
        view = self._views[file]
        if offset + sum(map(len, buffers)) > len(view):
            raise EOFError(max(0, len(view) - offset))
        for buffer in buffers:
            _move(buffer, view[offset : offset + len(buffer)])
            offset += len(buffer)

    def view(self, file: str, offset: int, nbytes: int) -> memoryview | None:
        view = self._views[file]
        return view[offset : offset + nbytes] if offset + nbytes <= len(view) else None


class Direct:
    """Past the page cache, by descriptors of its own. A thread reads blocks into memory of its own, and copies."""

    def __init__(self, files: Mapping[str, int]) -> None:
        self._fds: dict[str, int] = {}
        self._local = threading.local()
        try:
            for name, fd in files.items():
                self._fds[name] = _reopened(fd, os.O_DIRECT)
        except OSError as error:
            self.close()
            raise DeploymentError(
                "a file cannot be read past the page cache",
                expected="a file system that knows O_DIRECT",
                found=error.strerror,
                where=name,
                next_step="choose another --load-strategy, or auto",
            ) from error

    def expect(self, file: str, offset: int, nbytes: int) -> None:
        """Nothing: there is nowhere to put it."""

    def begin(self, extents: Iterator[Extent]) -> None:
        """Remembers how far this thread reads on: a block has what follows of it, too, and is read once."""
        self._block().begin(extents)

    def fill(self, file: str, buffers: Sequence[memoryview], offset: int) -> None:
        block, done = self._block(), 0
        for buffer in buffers:
            filled = 0
            while filled < len(buffer):
                there = block.bytes_from(file, offset + done)
                if not there:
                    block.read(self._fds[file], file, offset + done, len(buffer) - filled)
                    there = block.bytes_from(file, offset + done)
                if not there:
                    raise EOFError(done)
                some = min(len(there), len(buffer) - filled)
                _move(buffer[filled : filled + some], there[:some])
                filled += some
                done += some

    def view(self, file: str, offset: int, nbytes: int) -> memoryview | None:
        """None: nothing stays anywhere."""
        return None

    def close(self) -> None:
        """Close every descriptor. Safe to call again."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _block(self) -> _Block:
        if not hasattr(self._local, "block"):
            self._local.block = _Block()
        block: _Block = self._local.block
        return block


class _Block:
    """What one thread has read last past the page cache, in a large page, and how far it will read on."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, DIRECT_NBYTES + LARGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % LARGE_PAGE_NBYTES
        self._memory = memoryview(memory)[begin : begin + DIRECT_NBYTES]
        self._file = ""
        self._start = self._nbytes = 0
        """Which bytes of the file these are."""
        self._extents: Iterator[Extent] = iter(())
        self._extent: Extent | None = None

    def begin(self, extents: Iterator[Extent]) -> None:
        """What is read next, in this order."""
        self._extents = extents
        self._extent = next(extents, None)

    def bytes_from(self, file: str, offset: int) -> memoryview:
        """The file's bytes from ``offset``, as many as are here."""
        if file != self._file or not 0 <= offset - self._start < self._nbytes:
            return self._memory[:0]
        return self._memory[offset - self._start : self._nbytes]

    def read(self, fd: int, file: str, offset: int, nbytes: int) -> None:
        """The file's bytes from ``offset`` to the next multiple of :data:`DIRECT_NBYTES`, but only what is needed: as
        far as the extent goes that ``offset`` lies in, or so many where nobody has told of one.
        """
        stop = offset + nbytes
        while (extent := self._extent) is not None:
            if file == extent.file and 0 <= offset - extent.offset < extent.nbytes:
                stop = extent.offset + extent.nbytes
                break
            self._extent = next(self._extents, None)
        start = offset // _DIRECT_UNIT_NBYTES * _DIRECT_UNIT_NBYTES
        stop = min(
            -(-stop // _DIRECT_UNIT_NBYTES) * _DIRECT_UNIT_NBYTES,
            (start // DIRECT_NBYTES + 1) * DIRECT_NBYTES,
        )
        self._file, self._start, self._nbytes = file, start, 0
        self._nbytes = os.preadv(fd, [self._memory[: stop - start]], start)


def _reopened(fd: int, flags: int = 0) -> int:
    """Another descriptor of the same file, whatever became of its name."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flags)


def _mapped(fd: int) -> memoryview:
    if not os.fstat(fd).st_size:
        return memoryview(b"")
    mapping = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)  # ctypes takes no other
    mapping.madvise(mmap.MADV_SEQUENTIAL)
    return memoryview(mapping)


def _move(target: memoryview, source: memoryview) -> None:
    """Copy, without the interpreter's lock unless it is little: both sides may wait for a disk."""
    if len(target) < _SMALL_NBYTES:
        target[:] = source
        return
    kind = ctypes.c_char * len(target)
    ctypes.memmove(kind.from_buffer(target), kind.from_buffer(source), len(target))


def _unfilled(buffers: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    for buffer in buffers:
        if done < len(buffer):
            yield buffer[done:]
        done = max(0, done - len(buffer))


def _window_nbytes(fd: int) -> int:
    """How far the kernel reads ahead in the file: its disk's setting, or its network file system's."""
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    places = (f"/sys/class/bdi/{name}", f"/sys/dev/block/{name}/queue", f"/sys/dev/block/{name}/../queue")
    for place in places:  # of a partition, its disk's; a container may hide them all
        with suppress(OSError), open(f"{place}/read_ahead_kb", encoding="ascii") as file:
            return max(WINDOW_NBYTES, int(file.read()) << 10)
    return WINDOW_NBYTES


def _cached_nbytes(fd: int) -> int:
    """How much of the file lies in the page cache; 0 where the kernel does not tell."""
    everything, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if _libc.syscall(_CACHESTAT, fd, everything, counts, 0) != 0:
        return 0
    return min(int(counts[0]) * mmap.PAGESIZE, os.fstat(fd).st_size)


def _is_cached(fd: int, offset: int) -> bool:
    """Whether the byte can be read without waiting. False where the file system cannot tell."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # not there (EAGAIN), or not to be told (EOPNOTSUPP); a real fault shows when the slab is read
        return False


def _advise(fd: int, offset: int, nbytes: int, advice: int) -> None:
    """Advice is a wish: a file system that does not take it is read without."""
    try:
        os.posix_fadvise(fd, offset, nbytes, advice)
    except OSError as error:
        if error.errno not in _NO_ADVICE:
            raise
