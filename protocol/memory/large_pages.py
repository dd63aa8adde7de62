"""Large pages for a segment that is about to be filled: 2 MiB instead of 4 KiB, where the kernel has them to give.

Owns making them, stretch by stretch before whoever writes there, giving up where that does not pay, and lending their
memory to be written in place. Used by the loader on a segment that is not sealed yet. Never fails and changes no byte:
what stays small is slower, not wrong.

Why: taking small pages is most of the cost of filling a segment (a third of the speed), and every engine that attaches
pays again for mapping them at first touch (some 200 ms a GiB, instead of 15). How: MADV_COLLAPSE makes one large page
of the small ones of a range (Linux 6.1). It is told what to do, so it heeds none of the switches for shared memory's
large pages but ``deny``. A range without any page is refused, so each is given one first, by fallocate, which keeps
what is there; a writer that was faster loses nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time

from weightcached.protocol.errors import TransferError
from weightcached.protocol.memory import host

STRETCH_NBYTES = 16 * host.LARGE_PAGE_NBYTES
"""Made by one call: each call waits until every processor has emptied its list of new pages."""

SLOW_STRETCH_S = 0.04
"""Of this thread's own processor time. More, and the kernel has to move memory around for each page, or a virtual
machine's host has to find it first."""

SLOW_IN_A_ROW_MAX = 3

_MADV_COLLAPSE = 25
_ATTEMPTS = 3

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class LargePages:
    """Of one segment; a context manager. Thread-safe. Left before the segment is sealed: it maps the segment."""

    def __init__(self, segment: int, *, nbytes: int) -> None:
        """``segment`` is a writable descriptor that outlives this. Bytes past the last whole large page stay small."""
        self._segment = segment
        nbytes = min(nbytes, os.fstat(segment).st_size)
        self._nbytes = nbytes
        self._end = nbytes // host.LARGE_PAGE_NBYTES * host.LARGE_PAGE_NBYTES
        self._changed = threading.Condition()
        self._begun = bytearray(-(-self._end // STRETCH_NBYTES))
        """One byte for each stretch: whether somebody has taken it upon himself to make it."""
        self._ended = bytearray(len(self._begun))
        """Whether he is through."""
        self._made = bytearray(len(self._begun))
        """Whether it is made."""
        self._slow_in_a_row = 0
        self.made_nbytes = 0
        self.gave_up: str | None = None if self._end else "the segment is smaller than one"
        """Why no more are made, for the log."""
        self._mapping: host.Mapping | None = None
        self._memory: memoryview | None = None
        if self._end:
            try:
                self._mapping = host.map_shared(segment, nbytes=self._end)
                self._memory = self._mapping.view()
            except TransferError as error:
                self.gave_up = f"the segment cannot be mapped: {error.found}"

    def prepare(self, start: int, stop: int) -> None:
        """Bytes ``start .. stop`` will be written: make what is missing there, and wait for what others are making.

        Blocks for some milliseconds a stretch. Called by each thread that fills the segment, before it does.
        """
        numbers = range(start // STRETCH_NBYTES, min(-(-stop // STRETCH_NBYTES), len(self._begun)))
        for number in numbers:
            with self._changed:
                if self._begun[number] or self.gave_up is not None:
                    continue
                self._begun[number] = True
            self._make_stretch(number)
        with self._changed:
            self._changed.wait_for(lambda: all(self._ended[number] >= self._begun[number] for number in numbers))

    def _make_stretch(self, number: int) -> None:
        start = number * STRETCH_NBYTES
        stop = min(start + STRETCH_NBYTES, self._end)
        began_s = time.thread_time()
        trouble = self._make(start, stop)
        seconds = time.thread_time() - began_s
        with self._changed:
            if trouble is None:
                self.made_nbytes += stop - start
                self._made[number] = True
            self._slow_in_a_row = self._slow_in_a_row + 1 if trouble or seconds > SLOW_STRETCH_S else 0
            if self._slow_in_a_row >= SLOW_IN_A_ROW_MAX:
                self.gave_up = trouble or f"the kernel takes {seconds * 1e3:.0f} ms for {(stop - start) >> 20} MiB"
            self._ended[number] = True
            self._changed.notify_all()

    def _make(self, start: int, stop: int) -> str | None:
        """Returns what was in the way, if anything was."""
        assert self._mapping is not None  # noqa: S101 (there is a stretch, so there is a mapping)
        try:
            for page in range(start, stop, host.LARGE_PAGE_NBYTES):
                os.posix_fallocate(self._segment, page, 1)
        except OSError as error:
            return error.strerror  # whoever writes meets it too, and reports it
        for _ in range(_ATTEMPTS):
            if _libc.madvise(self._mapping.address + start, stop - start, _MADV_COLLAPSE) == 0:
                return None
            number = ctypes.get_errno()
            if number != errno.EAGAIN:  # a page was busy for a moment
                break
        return os.strerror(number)

    def memory(self, offset: int, nbytes: int) -> memoryview | None:
        """The segment's own bytes from ``offset``, to be written; None unless all of them lie in large pages made here.

        Writing there takes no page from anybody, so it cannot run out of memory. Not to be kept past :meth:`close`.
        """
        first, last = offset // STRETCH_NBYTES, -(-(offset + nbytes) // STRETCH_NBYTES)
        if self._memory is None or offset + nbytes > self._end or self._made.find(False, first, last) >= 0:
            return None
        return self._memory[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap. No thread may be in :meth:`prepare`, and nothing that :meth:`memory` gave may be used again."""
        self._memory = None
        if self._mapping is not None:
            self._mapping.close()

    def __str__(self) -> str:
        """``1000 of 1002 MiB``, and why no more."""
        share = f"{self.made_nbytes >> 20} of {self._nbytes >> 20} MiB"
        return share if self.gave_up is None else f"{share}: {self.gave_up}"

    def __enter__(self) -> LargePages:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
