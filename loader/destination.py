"""Destinations: where an execution's bytes go. Segments in a host's memory here; those on a device in ``device.py``.

Owns the interface between the threads that make bytes and the memory that keeps them, and the host's side of it. A
destination lends rooms: memory that a slab's bytes are brought into (read, or computed), and that belongs to one place
of a segment. On a host a room is the segment's own memory; on a device it is staging memory, copied from there. What
bytes mean, and in which order they are made and digested, is the executor's.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weightcached.protocol.errors import InsufficientMemory
from weightcached.protocol.memory.large_pages import LargePages

if TYPE_CHECKING:
    from weightcached.loader.bench import DevicePort
    from weightcached.loader.slabs import Slab


class Abandoned(Exception):
    """Another thread failed: there is nothing to wait for any more."""


class Room(Protocol):
    """Memory for the bytes of one place. Whoever was lent it fills it, then calls :meth:`filled`, once."""

    @property
    def memory(self) -> memoryview: ...

    def filled(self) -> None:
        """Its bytes are what shall stay at the place. They may be read on, and not be written any more."""
        ...

    def digested(self) -> None:
        """Nobody will read its bytes again: it may be lent for another place. Called by any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that go into a segment: to parameter ``name``, from byte ``offset`` of it."""

    name: str
    offset: int
    data: memoryview
    room: Room | None = None
    """The destination's, that they lie in; None where they are to be written."""


class Port(Protocol):
    """One thread's way into a destination; that thread alone calls it."""

    def lend(self, segment: int, offset: int, nbytes: int) -> Room | None:
        """Room for these bytes of a segment; None where there is none, and :meth:`write` is to be used.

        May wait until what this thread was lent before has been digested: so slabs are to be worked on in order.
        Raises Abandoned when that has become pointless.
        """
        ...

    def write(self, data: memoryview, segment: int, offset: int) -> None:
        """Bring ``data`` to ``offset`` of a segment. It may be written again when this returns."""
        ...

    def buffer(self, nbytes: int) -> memoryview:
        """Memory for what cannot be read to where it belongs. What it gave before is of no use any more."""
        ...

    @property
    def on_device(self) -> DevicePort | None:
        """The same, for whoever works in the memory of the device that the segments are on; None: they are not."""
        ...


class Straight(Protocol):
    """Reads slabs to where they belong on a device. Thread-safe."""

    def takes(self, slab: Slab) -> bool:
        """Whether it can read the slab; if not, it is read as ever."""
        ...

    def fill(self, slab: Slab, address: int) -> int:
        """Read all of it to ``address`` of the device, and return the bytes read. Blocks. Raises errors that name file
        and tensor.
        """
        ...

    def close(self) -> None: ...


class Destination(Protocol):
    """Segments, by their numbers, that are about to be filled; a context manager, left when no thread uses it any more.
    Thread-safe.
    """

    @property
    def on_host(self) -> bool:
        """Whether what is resident takes the host's memory."""
        ...

    @property
    def lends(self) -> bool:
        """Whether it lends room for most slabs. Where it does not, a thread waits for others after each slab."""
        ...

    def prepare(self, segment: int, start: int, stop: int) -> None:
        """Bytes ``start .. stop`` of a segment will be filled next, by this thread."""
        ...

    def port(self, slab_nbytes: int) -> AbstractContextManager[Port]:
        """For the calling thread, which works on slabs of so many bytes. What it was lent outlives the port: it is good
        until the destination is left.
        """
        ...

    def straight(self, files: Mapping[str, int]) -> tuple[Straight | None, str]:
        """A way from ``files`` (name → descriptor) into the segments past the host's memory, which has been tried and
        is the caller's to close; or None, and why there is none. Called once it is entered.
        """
        ...

    def finish(self) -> None:
        """All has been filled: wait until it is where it belongs. Raises what went wrong on the way there."""
        ...

    def abandon(self) -> None:
        """The execution has failed: nobody shall wait any longer."""
        ...

    def __enter__(self) -> Destination: ...

    def __exit__(self, kind: object, failure: BaseException | None, traceback: object, /) -> None: ...


Target = int | Sequence[int] | Destination
"""What is about to be filled: a writable descriptor of host memory for each segment (of one, just that), or a
destination that nobody has entered."""


def descriptors(target: Target) -> Sequence[int] | None:
    """Of a host's segments, each one's; None: it is a destination."""
    if isinstance(target, int):
        return (target,)
    return target if isinstance(target, Sequence) else None


def as_destination(target: Target, segments_nbytes: Sequence[int]) -> Destination:
    """What fills segments of these sizes."""
    if isinstance(target, int):
        target = (target,)
    return HostSegments(target, nbytes=segments_nbytes) if isinstance(target, Sequence) else target


class InPlace:
    """Room with which there is nothing more to be done: the segment itself, or bytes that are there already."""

    __slots__ = ("memory",)

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    def filled(self) -> None:
        pass

    def digested(self) -> None:
        pass


class HostSegments:
    """Segments in a host's memory, by writable descriptors that outlive this. All threads share one port: this."""

    on_host = True
    on_device = None

    def __init__(self, segments: Sequence[int], *, nbytes: Sequence[int]) -> None:
        """``nbytes``: of each."""
        self._segments = segments
        self._pages: list[LargePages] = []
        try:
            for segment, size in zip(segments, nbytes, strict=True):
                self._pages.append(LargePages(segment, nbytes=size))
        except BaseException:
            self._close()
            raise

    @property
    def lends(self) -> bool:
        return any(pages.gave_up is None for pages in self._pages)

    def prepare(self, segment: int, start: int, stop: int) -> None:
        self._pages[segment].prepare(start, stop)

    def port(self, slab_nbytes: int) -> AbstractContextManager[HostSegments]:
        return nullcontext(self)

    def lend(self, segment: int, offset: int, nbytes: int) -> Room | None:
        """The segment's own memory, where its pages are there already: what is read right there is never copied."""
        memory = self._pages[segment].memory(offset, nbytes)
        return None if memory is None else InPlace(memory)

    def write(self, data: memoryview, segment: int, offset: int) -> None:
        """Whole pages that are fresh are taken without being zeroed first. Raises InsufficientMemory."""
        fd = self._segments[segment]
        try:
            done = os.pwrite(fd, data, offset)
            while done < len(data):
                done += os.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            raise InsufficientMemory(
                "a segment cannot be filled",
                expected=f"{len(data)} bytes more at {offset} of segment {segment}",
                found=error.strerror,
                next_step="free memory on this host, or raise the limit of the daemon's control group",
            ) from error

    def buffer(self, nbytes: int) -> memoryview:
        return memoryview(mmap.mmap(-1, nbytes))

    def straight(self, files: Mapping[str, int]) -> tuple[Straight | None, str]:
        return None, "the weights stay in the host's memory"

    def finish(self) -> None:
        """Nothing is under way: what was written is there."""

    def abandon(self) -> None:
        """Nobody waits here for what may not come."""

    def __enter__(self) -> HostSegments:
        return self

    def __exit__(self, _kind: object, _failure: BaseException | None, _traceback: object) -> None:
        self._close()

    def _close(self) -> None:
        for pages in self._pages:
            pages.close()

    def __str__(self) -> str:
        return f"large pages: {'; '.join(map(str, self._pages))}"
