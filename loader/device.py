"""A segment on a device as destination: file → staging in pinned host memory → device, all three at the same time.

Owns the staging, the copies and their order. Borrows the context and the mapped segment; the bytes that are lent here
are those that are digested *and* copied, so what lands is what was digested (the row digests let anybody read back and
compare). Each thread has a stream and a ring of rooms of its own: while one room is copied, the next is read into and
those before are digested. The device holds nothing but the segment: staging is the host's, at most :data:`ROOMS` + 1
slabs a thread.

Values are cast and quantized before the copy, on the host, by the arithmetic that host segments get, so that the bytes
are the same on both. Not here yet, and not without a device to measure on: quantizing on the device, and reading past
the host's memory (GPUDirect Storage), of which nothing could be digested on its way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightcached.loader.destination import Abandoned
from weightcached.protocol.errors import InsufficientMemory, WeightCacheError
from weightcached.protocol.memory.cuda.context import Context, Event, Stream
from weightcached.protocol.memory.cuda.staging import Pinned

log = logging.getLogger(__name__)

ROOMS = 4
"""Of each thread: a run of slabs fits, so that threads rarely wait for others whose turn it is to digest."""


class DeviceSegment:
    """``nbytes`` at ``address`` on the context's device, writable and nobody else's yet; they outlive this.

    Bytes that no parameter takes become zeros: fresh memory of a device has what was there before, perhaps another
    process's, and engines are given the whole segment. Raises, at any step, InsufficientMemory where the host has no
    memory to pin, and DeviceFailed; after that the segment is of no use, and nothing is held any more.
    """

    on_host = False
    lends = True

    def __init__(self, context: Context, address: int, *, nbytes: int, memory: object = None) -> None:
        """``memory`` is what has to live for as long as this is kept, also when all is filled."""
        self._context = context
        self._address = address
        self._memory = memory
        self._nbytes = nbytes
        self._ports: list[_DevicePort] = []
        self._changed = threading.Condition()
        self._abandoned = False
        self._zeroing: Stream | None = None
        self._zeroed: Event | None = None

    def prepare(self, start: int, stop: int) -> None:
        """There is nothing to prepare: the memory is there."""

    @contextmanager
    def port(self, slab_nbytes: int) -> Iterator[_DevicePort]:
        """The context is current in this thread within. What was lent stays until this destination is left: others may
        be digesting it still.
        """
        with self._context.current():
            port = _DevicePort(self, slab_nbytes)
            with self._changed:
                self._ports.append(port)
            if self._zeroed is not None:
                port.stream.wait_for(self._zeroed)
            yield port

    def place(self, offset: int, nbytes: int) -> int:
        """The device's address of these bytes of the segment."""
        if not 0 <= offset <= offset + nbytes <= self._nbytes:
            raise ValueError(f"bytes {offset} .. {offset + nbytes} of a segment of {self._nbytes}")
        return self._address + offset

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
        with self._context.current():
            for stream in self._streams():
                stream.synchronize()

    def abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def __enter__(self) -> DeviceSegment:
        try:
            with self._context.current():
                if self._nbytes:
                    self._zeroing = Stream()
                    self._zeroed = Event()
                    self._zeroing.zero(self._address, self._nbytes)
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
            with self._context.current():
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

    def __init__(self, segment: DeviceSegment, stream: Stream, nbytes: int) -> None:
        self._segment = segment
        self._stream = stream
        self.copied = Event()
        try:
            self.pinned = _pinned(nbytes)
        except BaseException:
            self.copied.close()
            raise
        self.memory = self.pinned.view()
        self.lent = False
        """Whether somebody will still read it."""
        self._address = 0

    def lend(self, address: int, nbytes: int) -> _StagingRoom:
        self.memory = self.pinned.view()[:nbytes]
        self._address = address
        self.lent = True
        return self

    def filled(self) -> None:
        """Begins the copy, which goes on by itself."""
        self._stream.copy_in(self._address, self.pinned.address, len(self.memory))
        self.copied.record(self._stream)

    def digested(self) -> None:
        self._segment.digested(self)


class _DevicePort:
    """A thread's stream and its ring of rooms, made when they are first needed."""

    def __init__(self, segment: DeviceSegment, slab_nbytes: int) -> None:
        self._segment = segment
        self._room_nbytes = slab_nbytes
        self.stream = Stream()
        self._rooms: list[_StagingRoom] = []
        self._next = 0
        self._written: _StagingRoom | None = None

    @property
    def pinned_nbytes(self) -> int:
        return sum(room.pinned.nbytes for room in self._all())

    def lend(self, offset: int, nbytes: int) -> _StagingRoom | None:
        """The next room of the ring, once it is digested and copied; None for what is larger than a slab should be."""
        if nbytes > self._room_nbytes:
            return None
        address = self._segment.place(offset, nbytes)
        if len(self._rooms) < ROOMS:
            room = _StagingRoom(self._segment, self.stream, self._room_nbytes)
            self._rooms.append(room)
            return room.lend(address, nbytes)
        room = self._rooms[self._next]
        self._next = (self._next + 1) % ROOMS
        self._segment.wait_for(lambda: not room.lent)
        room.copied.wait()
        return room.lend(address, nbytes)

    def write(self, data: memoryview, offset: int) -> None:
        """By way of a room that is not of the ring: who writes may have been lent one, and would wait for himself."""
        if self._written is None:
            self._written = _StagingRoom(self._segment, self.stream, self._room_nbytes)
        for start in range(0, len(data), self._room_nbytes):
            piece = data[start : start + self._room_nbytes]
            self._written.copied.wait()
            self._written.lend(self._segment.place(offset + start, len(piece)), len(piece))
            self._written.memory[:] = piece
            self._written.filled()

    def closings(self) -> Iterator[Callable[[], None]]:
        """What gives everything back, step by step. The stream's work has ended."""
        for room in self._all():
            yield room.pinned.close
            yield room.copied.close
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
