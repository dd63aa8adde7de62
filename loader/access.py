"""Access: one way each in which bytes of an open file come into buffers, and what is known of a file before.

Owns the system calls of the four strategies. Opens nothing of its own accord but second descriptors of files it was
given. Thread-safe. What is read, and in which pieces, is `reading.py`'s; which way is taken is `strategy.py`'s.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from weightcached.loader.reading import VECTORS_MAX, Access, Extent
from weightcached.loader.strategy import AHEAD_NBYTES, WAITING_THREADS, FileFacts, Strategy
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
            direct = Direct(files, ahead_nbytes=strategy.ahead_nbytes // strategy.threads)
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
    """Past the page cache, by descriptors of its own. What a thread will read is read ahead of it, block by block, by
    threads that do nothing else; it copies out of these. So the disk is busy while it copies and digests.
    """

    def __init__(self, files: Mapping[str, int], *, ahead_nbytes: int = AHEAD_NBYTES) -> None:
        """``ahead_nbytes``: of a thread, how far ahead of it."""
        self._fds: dict[str, int] = {}
        self._ahead = max(1, ahead_nbytes // DIRECT_NBYTES)
        self._local = threading.local()
        try:
            for name, fd in files.items():
                self._fds[name] = _reopened(fd, os.O_DIRECT)
        except OSError as error:
            self._close_files()
            raise DeploymentError(
                "a file cannot be read past the page cache",
                expected="a file system that knows O_DIRECT",
                found=error.strerror,
                where=name,
                next_step="choose another --load-strategy, or auto",
            ) from error
        self._readers = ThreadPoolExecutor(WAITING_THREADS, thread_name_prefix="past the page cache")

    def expect(self, file: str, offset: int, nbytes: int) -> None:
        """Nothing: which thread will read it is not known yet."""

    def begin(self, extents: Iterator[Extent]) -> None:
        """Begins to read what this thread reads on. A block has what follows of it, too, and is read once."""
        self._blocks().begin(extents)

    def fill(self, file: str, buffers: Sequence[memoryview], offset: int) -> None:
        blocks, done = self._blocks(), 0
        for buffer in buffers:
            filled = 0
            while filled < len(buffer):
                there = blocks.bytes_from(file, offset + done, len(buffer) - filled)
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
        """Close every descriptor, once what is being read has been. No thread may read any more."""
        self._readers.shutdown(cancel_futures=True)
        self._close_files()

    def _close_files(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _blocks(self) -> _Blocks:
        if not hasattr(self._local, "blocks"):
            self._local.blocks = _Blocks(self._begin_block, self._ahead)
        blocks: _Blocks = self._local.blocks
        return blocks

    def _begin_block(self, extent: Extent, memory: memoryview) -> _Block:
        read = self._readers.submit(os.preadv, self._fds[extent.file], [memory[: extent.nbytes]], extent.offset)
        return _Block(extent, memory, read)


class _Block(NamedTuple):
    """Bytes of a file that are being read, or have been, into a large page."""

    extent: Extent
    memory: memoryview
    read: Future[int]

    def bytes_from(self, file: str, offset: int) -> memoryview:
        """The file's bytes from ``offset``, as many as are here. Waits for them where there are any. Raises OSError."""
        at = offset - self.extent.offset
        if file != self.extent.file or not 0 <= at < self.extent.nbytes:
            return self.memory[:0]
        return self.memory[at : max(at, self.read.result())]


class _Blocks:
    """Of one thread: the block that it copies from, and those that come after it, as far as it was told."""

    def __init__(self, begin_block: Callable[[Extent, memoryview], _Block], ahead: int) -> None:
        self._begin_block = begin_block
        self._ahead = ahead
        self._spare: list[memoryview] = []
        self._blocks: deque[_Block] = deque()
        self._coming: Iterator[Extent] = iter(())

    def begin(self, extents: Iterator[Extent]) -> None:
        """What is read next, in this order."""
        while self._blocks:
            self._drop_first()
        self._coming = itertools.chain.from_iterable(_aligned(extent) for extent in extents)
        self._read_ahead()

    def bytes_from(self, file: str, offset: int, nbytes: int) -> memoryview:
        """The file's bytes from ``offset``, some at least unless it ends there; of ``nbytes`` where nobody has told of
        them. What comes before it is of no use any more. Raises OSError.
        """
        while self._blocks:
            if there := self._blocks[0].bytes_from(file, offset):
                return there
            self._drop_first()
            self._read_ahead()
        self._blocks.append(self._begin_block(next(_aligned(Extent(file, offset, nbytes))), self._memory()))
        return self._blocks[0].bytes_from(file, offset)

    def _read_ahead(self) -> None:
        while len(self._blocks) <= self._ahead and (extent := next(self._coming, None)) is not None:
            self._blocks.append(self._begin_block(extent, self._memory()))

    def _drop_first(self) -> None:
        block = self._blocks.popleft()
        if not block.read.cancel():
            wait([block.read])
        self._spare.append(block.memory)

    def _memory(self) -> memoryview:
        return self._spare.pop() if self._spare else _large_page()


def _aligned(extent: Extent) -> Iterator[Extent]:
    """The blocks that it lies in, each no further than is needed."""
    unit = _DIRECT_UNIT_NBYTES
    start, stop = extent.offset // unit * unit, -(-(extent.offset + extent.nbytes) // unit) * unit
    while start < stop:
        end = min(stop, (start // DIRECT_NBYTES + 1) * DIRECT_NBYTES)
        yield Extent(extent.file, start, end - start)
        start = end


def _large_page() -> memoryview:
    """:data:`DIRECT_NBYTES` of memory that are one, where the kernel has them."""
    memory = mmap.mmap(-1, DIRECT_NBYTES + LARGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % LARGE_PAGE_NBYTES
    return memoryview(memory)[begin : begin + DIRECT_NBYTES]


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
