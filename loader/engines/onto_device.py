"""An engine's state onto a GPU: the driver copies what the engine built there, and what it built in host memory goes by
way of pinned staging.

Owns the copying and the digests. What is on the GPU is digested as it lies at its place, read back; what comes from the
host as it is staged. Uses torch to look at tensors only, but for those with gaps. The device holds the engine's state
and the segment, and for a tensor with gaps one copy of it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from weightcached.loader.device import DeviceSegments
from weightcached.loader.engines.moving import dense, is_on_gpu
from weightcached.loader.engines.state import PlacedTensor
from weightcached.protocol.memory.cuda import driver
from weightcached.protocol.memory.cuda.context import Stream
from weightcached.protocol.memory.cuda.staging import Pinned
from weightcached.protocol.memory.giving_up import ClosedAfterwards

if TYPE_CHECKING:
    import torch

    from weightcached.loader.destination import Port

SLAB_NBYTES = 8 << 20
COPY_THREADS_MAX = 4
PROGRESS_EVERY_S = 0.1


def copy_onto(
    places: Sequence[PlacedTensor], segment: DeviceSegments, progress: Callable[[int, int], None]
) -> dict[str, bytes]:
    """Copy every tensor to its place in ``segment``, which is one and which nobody has entered yet, with a few threads.
    Name → XXH3-128 of the bytes of its place. Blocks until all of it is there.

    Raises DeviceFailed, InsufficientMemory where the host has nothing to pin or the GPU no room for a copy.
    """
    work = _Work(places, progress)
    with segment:
        try:
            threads = min(len(os.sched_getaffinity(0)), COPY_THREADS_MAX)
            with ThreadPoolExecutor(threads) as pool:
                for done in [pool.submit(_copy_some, work, segment) for _ in range(threads)]:
                    done.result()
        except BaseException:
            segment.abandon()
            raise
        segment.finish()
    return work.digests


class _Work:
    """What is to be copied, and what has been: shared by the threads."""

    def __init__(self, places: Sequence[PlacedTensor], progress: Callable[[int, int], None]) -> None:
        self.digests: dict[str, bytes] = {}
        self._progress = progress
        self._lock = threading.Lock()
        self._left = iter(places)
        self._total = sum(one.nbytes for one in places)
        self._done = 0
        self._told_s = 0.0

    def __iter__(self) -> Iterator[PlacedTensor]:
        while True:
            with self._lock:
                one = next(self._left, None)
            if one is None:
                return
            yield one

    def copied(self, one: PlacedTensor, digest: bytes) -> None:
        with self._lock:
            self.digests[one.name] = digest
            self._done += one.nbytes
            if self._done == self._total or time.monotonic() >= self._told_s + PROGRESS_EVERY_S:
                self._told_s = time.monotonic()
                self._progress(self._done, self._total)


def _copy_some(work: _Work, segment: DeviceSegments) -> None:
    with segment.port(SLAB_NBYTES) as port, _Reading(port.stream) as reading:
        for one in work:
            if not one.nbytes:
                digest = xxhash.xxh3_128().digest()
            elif is_on_gpu(one.tensor):
                driver.call("cuCtxSynchronize", asked="the end of what the engine is doing")
                source = dense(one)
                if source.data_ptr() != one.tensor.data_ptr():
                    driver.call("cuCtxSynchronize", asked="the end of closing a tensor's gaps")
                address = segment.place(0, one.offset, one.nbytes)
                port.stream.copy_within(address, source.data_ptr(), one.nbytes)
                digest = reading.digest(address, one.nbytes)
            else:
                digest = _staged(_bytes_of(dense(one)), one.offset, port)
            work.copied(one, digest)


def _staged(data: memoryview, offset: int, port: Port) -> bytes:
    hasher = xxhash.xxh3_128()
    for start in range(0, len(data), SLAB_NBYTES):
        piece = data[start : start + SLAB_NBYTES]
        room = port.lend(0, offset + start, len(piece))
        if room is None:
            port.write(piece, 0, offset + start)
            hasher.update(piece)
            continue
        room.memory[:] = piece
        room.filled()
        hasher.update(room.memory)
        room.digested()
    return hasher.digest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A host's tensor of bytes, not copied."""
    block = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    block.owner = tensor  # type: ignore[attr-defined]  # ctypes arrays take attributes; this one holds the memory
    return memoryview(block).cast("B")


class _Reading(ClosedAfterwards):
    """One thread's way back from the GPU, for digests. Its memory is taken when it is first needed."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pinned: Pinned | None = None

    def digest(self, address: int, nbytes: int) -> bytes:
        """Of what lies there once all that the stream was given is done."""
        if self._pinned is None:
            self._pinned = Pinned(SLAB_NBYTES)
        hasher = xxhash.xxh3_128()
        for start in range(0, nbytes, SLAB_NBYTES):
            length = min(SLAB_NBYTES, nbytes - start)
            self._stream.copy_out(self._pinned.address, address + start, length)
            self._stream.synchronize()
            hasher.update(self._pinned.view()[:length])
        return hasher.digest()

    def close(self) -> None:
        if self._pinned is not None:
            with self._pinned:
                self._stream.synchronize()
