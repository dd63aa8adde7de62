"""One parameter of a rank while it is pushed: how much of it has come, and where its bytes wait.

Where bytes can go straight to their place (a host's segment, nothing to convert) nothing waits; else the parameter is
assembled in memory of ours, as it is before its transform, until it is whole. That memory is used again. Thread-safe.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from weightcached.loader.boxes import Box, is_contiguous
from weightcached.loader.layout import Placed
from weightcached.loader.planned import PlannedParameter
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.memory.admission import admit

UNASKED_NBYTES = 256 << 20
"""Of memory for assembling that is taken without looking whether there is room."""


@dataclass(slots=True)
class Filling:
    """``left``: elements of the copies that have not come. ``hashed``: resident bytes, from the first, that ``hasher``
    has seen; ``hashing``: whether a thread is at it.
    """

    placed: Placed
    straight: bool
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    memory: memoryview | None = None
    hasher: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    hashed: int = 0
    hashing: bool = False

    @classmethod
    def of(cls, placed: Placed, *, on_host: bool) -> Filling:
        one = placed.parameter
        straight = (
            on_host
            and one.transform is None
            and all(not copy.transposed and is_contiguous(copy.destination, one.shape) for copy in one.copies)
        )
        return cls(placed, straight, sum(copy.destination.volume for copy in one.copies))

    def claim(self, start: int) -> bool:
        """Whether the caller hashes the bytes from ``start`` on: they come next, and nobody else does."""
        with self.lock:
            mine = not self.hashing and self.hashed == start
            self.hashing = self.hashing or mine
            return mine

    def release(self, nbytes: int) -> None:
        """Who claimed has hashed so many."""
        with self.lock:
            self.hashed += nbytes
            self.hashing = False

    def came(self, elements: int) -> bool:
        """So many more are where they belong; whether these were the last."""
        with self.lock:
            self.left -= elements
            return self.left == 0


def source_nbytes(parameter: PlannedParameter) -> int:
    """Of the parameter before its transform."""
    return math.prod(parameter.source_shape) * itemsize_bytes(parameter.source_dtype or parameter.dtype)


def elements_of(memory: memoryview, itemsize: int, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
    """The memory from ``offset`` on as an array of items whose meaning does not matter."""
    return np.ndarray(shape, np.dtype(f"u{itemsize}"), memory, offset)


def zero(array: np.ndarray, boxes: Iterable[Box]) -> None:
    """Padding."""
    for box in boxes:
        array[slices(box)] = 0


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


class Pool:
    """Memory to assemble parameters in. Layers repeat sizes, so most of it is used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self.taken_nbytes = 0
        """In all, free ones included."""

    def take(self, nbytes: int) -> memoryview:
        """Of this size; what is in it does not matter. Raises InsufficientMemory once it is much."""
        with self._lock:
            if free := self._free.get(nbytes):
                return free.pop()
            self.taken_nbytes += nbytes
            much = self.taken_nbytes > UNASKED_NBYTES
            if much:
                for other in self._free.values():  # of sizes that are not wanted now
                    self.taken_nbytes -= sum(map(len, other))
                    other.clear()
        if much:
            admit(nbytes)
        return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]

    def give(self, memory: memoryview) -> None:
        with self._lock:
            self._free.setdefault(len(memory), []).append(memory)
