"""Held matrices: weights of which nothing can be quantized before all their values have been read.

Owns the memory that such a matrix waits in between being read, measured, and quantized from there, and what is known
of it. Two at a time, so that one is read while the other is quantized: the bound of what a load needs besides its
segment. Threads take slabs in order, which is why waiting here cannot last: whatever a thread waits for was claimed
before. What is in the memory is the threads' business.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from weightcached.loader.destination import Abandoned
from weightcached.loader.planned import PlannedParameter
from weightcached.loader.slabs import Slab, measures_first
from weightcached.protocol.dtypes import itemsize_bytes

HELD_MAX = 2


@dataclass(slots=True)
class _Matrix:
    memory: memoryview
    unmeasured: int
    """Elements."""
    unfinished: int
    largest: float = 0.0


def staggered(slabs: Iterable[Slab]) -> Iterator[Slab]:
    """The same slabs, but those that quantize a held matrix wait until the next are read, and come between these: so
    reading goes on meanwhile. No third matrix is begun before the first has come to its end.
    """
    waiting: deque[Slab] = deque()
    for slab in slabs:
        if slab.step == "quantize":
            while waiting and _matrix_of(waiting[0]) != _matrix_of(slab):
                yield waiting.popleft()
            waiting.append(slab)
            continue
        yield slab
        if waiting:
            yield waiting.popleft()
    yield from waiting


class Held:
    """All threads' held matrices. Any thread may call; those that wait end with Abandoned after :meth:`abandon`."""

    def __init__(self, parameters: Iterable[PlannedParameter]) -> None:
        """``parameters``: all that will be asked for. Takes no memory yet."""
        self._changed = threading.Condition()
        self._matrices: dict[tuple[str, int], _Matrix] = {}
        self._free: list[memoryview] = []
        self._largest_nbytes = max((_matrix_nbytes(one) for one in parameters if measures_first(one)), default=0)
        self._abandoned = False

    def memory(self, slab: Slab) -> memoryview:
        """Where the slab's source bytes lie, or will. Waits for room when it is the first of its matrix."""
        key, elements = _matrix_of(slab)
        itemsize = slab.source_nbytes // slab.elements
        with self._changed:
            self._wait(lambda: key in self._matrices or len(self._matrices) < HELD_MAX)
            if key not in self._matrices:
                self._matrices[key] = _Matrix(self._memory(), elements, elements)
            start = slab.first % elements * itemsize
            return self._matrices[key].memory[start : start + slab.source_nbytes]

    def measured(self, slab: Slab, largest: float) -> None:
        """The slab's values have been read, and this is the largest, by magnitude."""
        with self._changed:
            matrix = self._matrices[_matrix_of(slab)[0]]
            matrix.largest = max(matrix.largest, largest)
            matrix.unmeasured -= slab.elements
            self._changed.notify_all()

    def largest(self, slab: Slab) -> float:
        """The largest value of the slab's matrix, by magnitude. Waits until all of it has been measured."""
        with self._changed:
            matrix = self._matrices[_matrix_of(slab)[0]]
            self._wait(lambda: not matrix.unmeasured)
            return matrix.largest

    def finished(self, slab: Slab) -> None:
        """The slab's part of the memory is not needed any more."""
        key, _ = _matrix_of(slab)
        with self._changed:
            matrix = self._matrices[key]
            matrix.unfinished -= slab.elements
            if not matrix.unfinished:
                self._free.append(self._matrices.pop(key).memory)
                self._changed.notify_all()

    def abandon(self) -> None:
        """Nobody shall wait any longer."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._abandoned or ready())
        if self._abandoned:
            raise Abandoned

    def _memory(self) -> memoryview:
        """Room for any matrix: what was used before, or large pages, of which taking them costs little."""
        if self._free:
            return self._free.pop()
        memory = mmap.mmap(-1, self._largest_nbytes)
        with suppress(OSError):  # a kernel without large pages: small ones do
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(memory)


def _matrix_nbytes(parameter: PlannedParameter) -> int:
    itemsize = itemsize_bytes(parameter.source_dtype or parameter.dtype)
    return math.prod(parameter.source_shape[-2:]) * itemsize


def _matrix_of(slab: Slab) -> tuple[tuple[str, int], int]:
    """A key for the slab's matrix, and the matrix's elements."""
    elements = math.prod(slab.parameter.source_shape[-2:])
    return (slab.parameter.name, slab.first // elements), elements
