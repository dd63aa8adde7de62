"""Segments on a device as destination: file → staging in pinned host memory → device, all three at the same time.

Owns the staging, the copies and their order. Borrows the context and the mapped segments; the bytes that are lent here
are those that are digested *and* copied, so what lands is what was digested (the row digests let anybody read back and
compare). Each thread has a stream and a ring of rooms of its own: while one room is copied, the next is read into and
those before are digested. The device holds nothing but the segments: staging is the host's, at most :data:`ROOMS` + 2
slabs a thread.

Values are cast and quantized on the device where torch computes there (:class:`~weightcached.loader.bench.Computing`):
they are copied as the files have them, and what became of them is copied back to be digested. A thread then takes
scratch memory of the device for one slab, and waits for that slab: what overlaps are several threads' slabs. Otherwise
the host computes before the copy, by the same functions.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from weightcached.loader.bench import Computing
from weightcached.loader.destination import Abandoned, InPlace, Room, Straight
from weightcached.loader.strategy import SLABS_NBYTES
from weightcached.protocol.errors import InsufficientMemory, WeightCacheError
from weightcached.protocol.memory.cuda.context import Context, Event, Stream
from weightcached.protocol.memory.cuda.legacy import DeviceMemory
from weightcached.protocol.memory.cuda.staging import Pinned
from weightcached.protocol.memory.giving_up import give_up
from weightcached.protocol.memory.on_device import address_of

log = logging.getLogger(__name__)

ROOMS = 4
"""Of each thread: a run of slabs fits, so that threads rarely wait for others whose turn it is to digest."""


COMPUTING_NBYTES = 3 * SLABS_NBYTES
"""What a device that computes holds of ours beside its segments, at most and by default: for all slabs that are worked
on at a time their values, and the same as float32. Matrices that are never cut are more. What arithmetic takes in
passing torch's allocator takes from the driver, in pieces of its own sizes, and apart for each thread's stream."""


class Span(NamedTuple):
    """``nbytes`` of a device's memory at ``address``."""

    address: int
    nbytes: int


class DeviceSegments:
    """Segments that are mapped on the context's device, writable and nobody else's yet; they outlive this.

    Bytes that no parameter takes become zeros: fresh memory of a device has what was there before, perhaps another
    process's, and engines are given whole segments. Raises, at any step, InsufficientMemory where the host has no
    memory to pin, and DeviceFailed; after that the segments are of no use, and nothing is held any more.
    """

    on_host = False
    lends = True

    def __init__(
        self,
        context: Context,
        segments: Sequence[Span],
        *,
        computing: Computing | None = None,
        memory: object = None,
    ) -> None:
        """``computing``: how arithmetic happens on the device; None: the host does it. ``memory`` is what has to live
        for as long as this is kept, also when all is filled.
        """
        self.context = context
        self.computing = computing
        self._memory = memory
        self._segments = segments
        self._ports: list[_DevicePort] = []
        self._changed = threading.Condition()
        self._abandoned = False
        self._zeroing: Stream | None = None
        self._zeroed: Event | None = None

    def prepare(self, segment: int, start: int, stop: int) -> None:
        """There is nothing to prepare: the memory is there."""

    @contextmanager
    def port(self, slab_nbytes: int) -> Iterator[_DevicePort]:
        """The context is current in this thread within. What was lent stays until this destination is left: others may
        be digesting it still.
        """
        with self.context.current():
            port = _DevicePort(self, slab_nbytes)
            with self._changed:
                self._ports.append(port)
            if self._zeroed is not None:
                port.stream.wait_for(self._zeroed)
            yield port

    def place(self, segment: int, offset: int, nbytes: int) -> int:
        """The device's address of these bytes of a segment."""
        span = self._segments[segment]
        if not 0 <= offset <= offset + nbytes <= span.nbytes:
            raise ValueError(f"bytes {offset} .. {offset + nbytes} of a segment of {span.nbytes}")
        return span.address + offset

    def straight(self, files: Mapping[str, int]) -> tuple[Straight | None, str]:
        from weightcached.loader.gds import probed

        return probed(files, self.context)

    def wait_for(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or ready())
            if self._abandoned:
                raise Abandoned

    def digested(self, room: _StagingRoom) -> None:
        with self._changed:
            room.lent = False
            self._changed.notify_all()

    def finish(self) -> None:
        with self.context.current():
            for stream in self._streams():
                stream.synchronize()

    def abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def __enter__(self) -> DeviceSegments:
        try:
            with self.context.current():
                self._zeroing = Stream()
                self._zeroed = Event()
                for span in self._segments:
                    if span.nbytes:
                        self._zeroing.zero(span.address, span.nbytes)
                self._zeroed.record(self._zeroing)
        except BaseException as failure:
            self._give_back(failure)
            raise
        return self

    def __exit__(self, _type: object, failure: BaseException | None, _traceback: object) -> None:
        self._give_back(failure)

    def _give_back(self, failure: BaseException | None) -> None:
        """Give everything back, but no memory before the copies from it have ended. Of a device that failed, what else
        fails now is not what matters: the first failure goes on.
        """
        steps: list[Callable[[], None]] = [stream.synchronize for stream in self._streams()]
        steps += [close for port in self._ports for close in port.closings()]
        steps += [one.close for one in (self._zeroed, self._zeroing) if one is not None]
        first: WeightCacheError | None = None
        try:
            with self.context.current():
                for step in steps:
                    try:
                        step()
                    except WeightCacheError as error:
                        first = first or error
        except WeightCacheError as error:
            first = first or error
        if first is not None:
            if failure is None:
                raise first
            log.warning("while giving back what a failed load held: %s", first)

    def _streams(self) -> list[Stream]:
        return [*(port.stream for port in self._ports), *([] if self._zeroing is None else [self._zeroing])]

    def __str__(self) -> str:
        pinned = sum(port.pinned_nbytes for port in self._ports)
        return f"staging: {pinned / 2**20:.0f} MiB of pinned memory, {len(self._ports)} streams"


class _StagingRoom:
    """A piece of pinned memory, lent for one place after the other."""

    def __init__(self, segments: DeviceSegments, stream: Stream, nbytes: int) -> None:
        self._segments = segments
        self._stream = stream
        self.copied = Event()
        try:
            self.pinned = _pinned(nbytes)
        except BaseException:
            give_up(self.copied)
            raise
        self.memory = self.pinned.view()
        self.lent = False
        """Whether somebody will still read it."""
        self._address = 0
        self._fetched = False

    def lend(self, address: int, nbytes: int) -> _StagingRoom:
        self.memory = self.pinned.view()[:nbytes]
        self._address = address
        self._fetched = False
        self.lent = True
        return self

    def fetch(self) -> None:
        """Fill it with what lies at its place, which is to stay there. Blocks."""
        self._stream.copy_out(self.pinned.address, self._address, len(self.memory))
        self._stream.synchronize()
        self._fetched = True

    def filled(self) -> None:
        """Begins the copy, which goes on by itself."""
        if not self._fetched:
            self._stream.copy_in(self._address, self.pinned.address, len(self.memory))
            self.copied.record(self._stream)

    def digested(self) -> None:
        self._segments.digested(self)


class _DevicePort:
    """A thread's stream and its ring of rooms, made when they are first needed."""

    def __init__(self, segments: DeviceSegments, slab_nbytes: int) -> None:
        self._segments = segments
        self._room_nbytes = slab_nbytes
        self.stream = Stream()
        self._rooms: list[_StagingRoom] = []
        self._next = 0
        self._written: _StagingRoom | None = None
        self._buffer: Pinned | None = None
        self._scratch: dict[str, DeviceMemory] = {}

    @property
    def pinned_nbytes(self) -> int:
        return sum(room.pinned.nbytes for room in self._all()) + (self._buffer.nbytes if self._buffer else 0)

    def lend(self, segment: int, offset: int, nbytes: int) -> _StagingRoom | None:
        """The next room of the ring, once it is digested and copied; None for what is larger than a slab should be."""
        if nbytes > self._room_nbytes:
            return None
        address = self._segments.place(segment, offset, nbytes)
        if len(self._rooms) < ROOMS:
            room = _StagingRoom(self._segments, self.stream, self._room_nbytes)
            self._rooms.append(room)
            return room.lend(address, nbytes)
        room = self._rooms[self._next]
        self._next = (self._next + 1) % ROOMS
        self._segments.wait_for(lambda: not room.lent)
        room.copied.wait()
        return room.lend(address, nbytes)

    def write(self, data: memoryview, segment: int, offset: int) -> None:
        """By way of a room that is not of the ring: who writes may have been lent one, and would wait for himself."""
        if self._written is None:
            self._written = _StagingRoom(self._segments, self.stream, self._room_nbytes)
        for start in range(0, len(data), self._room_nbytes):
            piece = data[start : start + self._room_nbytes]
            self._written.copied.wait()
            self._written.lend(self._segments.place(segment, offset + start, len(piece)), len(piece))
            self._written.memory[:] = piece
            self._written.filled()

    def buffer(self, nbytes: int) -> memoryview:
        """Pinned where the device computes, which is brought every byte of it."""
        if self._segments.computing is None:
            return memoryview(mmap.mmap(-1, nbytes))
        if self._buffer is not None:
            self.stream.synchronize()
            self._buffer.close()
        self._buffer = _pinned(nbytes)
        return self._buffer.view()

    @property
    def on_device(self) -> _DevicePort:
        return self

    @property
    def computing(self) -> Computing | None:
        return self._segments.computing

    def place(self, segment: int, offset: int, nbytes: int) -> int:
        return self._segments.place(segment, offset, nbytes)

    def scratch(self, purpose: str, nbytes: int) -> int:
        """Grows as slabs do, to a slab's size at most, or to what a larger one takes. Raises InsufficientMemory."""
        held = self._scratch.get(purpose)
        if held is None or held.nbytes < nbytes:
            wanted = nbytes
            if held is not None:
                wanted = max(nbytes, min(2 * held.nbytes, self._room_nbytes))
                self.stream.synchronize()
                held.close()
            held = DeviceMemory(wanted, device=self._segments.context.device)
            self._scratch[purpose] = held
        return held.address

    def bring(self, address: int, data: memoryview) -> None:
        self.stream.copy_in(address, address_of(data), len(data))

    def fetch(self, segment: int, offset: int, nbytes: int) -> Room:
        room = self.lend(segment, offset, nbytes)
        if room is not None:
            room.fetch()
            return room
        memory = memoryview(bytearray(nbytes))  # of what is larger than a slab should be
        self.stream.copy_out(address_of(memory), self.place(segment, offset, nbytes), nbytes)
        self.stream.synchronize()
        return InPlace(memory)

    def closings(self) -> Iterator[Callable[[], None]]:
        """What gives everything back, step by step. The stream's work has ended."""
        for room in self._all():
            yield room.pinned.close
            yield room.copied.close
        for memory in self._scratch.values():
            yield memory.close
        if self._buffer is not None:
            yield self._buffer.close
        yield self.stream.close

    def _all(self) -> list[_StagingRoom]:
        return [*self._rooms, *([] if self._written is None else [self._written])]


def _pinned(nbytes: int) -> Pinned:
    try:
        return Pinned(nbytes)
    except InsufficientMemory as error:
        raise InsufficientMemory(
            "the host has no memory to pin, which copies to the device start from",
            expected=error.expected,
            found=error.found,
            next_step="free memory on this host, or raise the limit of the daemon's control group",
        ) from error
