"""The interface of memory kinds: what keeper, worker and client do with a segment, whatever memory it is.

Owns the interface and finding the kind that a config names. Each kind is a module of its own: ``host`` is one as it
stands, others are objects that know their device. A segment is always a descriptor until it is mapped, and whoever has
that holds the memory, but for the kind that dies with its holder. The manifest is no segment: it is host memory
whatever the segments are.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, Self

from weightcached.protocol.memory import host
from weightcached.protocol.memory.admission import Room
from weightcached.protocol.memory.chosen import GPU_PREFIX

if TYPE_CHECKING:
    from weightcached.protocol.config import CacheConfig


class SegmentBytes(Protocol):
    """A mapped segment's bytes as the host can read them: the memory itself, or pieces of it copied when asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice, /) -> memoryview: ...


class SegmentMapping(AbstractContextManager["SegmentMapping"], Protocol):
    """A segment in this process's address space. Unmapped when closed, or when the last reference to it goes. A context
    manager, as :class:`ClosedAfterwards`.
    """

    nbytes: int
    """Of the segment; what is mapped may be rounded up."""
    resident_nbytes: int
    """What the segment takes of the memory."""

    @property
    def address(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def close(self) -> None:
        """Unmap now. Any view that still points here is invalid from now on. Safe to call twice."""

    def view(self) -> SegmentBytes:
        """Its bytes, for the host. Keeps the mapping alive. ValueError once closed."""

    def revert(self) -> None:
        """Give up whatever this process wrote there, where it can write at all. UnsupportedModel where others have it
        too.
        """

    def populate(self) -> None:
        """Enter every page into this process's page table, where that is done page by page."""

    def exchange(self, other: Self, /) -> None:
        """Show here what ``other`` shows, at the address that stays, and keep for ``other`` what was shown here. Again
        is the way back. Nobody may touch either meanwhile, or have views of ``other``.

        SwapRefused for another size. SwapFailed, DeviceFailed: then both are what they were, or the message says so.
        """

    def written(self) -> list[tuple[int, int]]:
        """[start, stop) of the bytes, in whole pages, that this process has of its own because it wrote there. Goes
        through all pages where there can be any. OSError where the system does not tell.
        """

    def settle(self) -> None:
        """Wait for whatever this process still computes with the memory by itself, on a device."""


class MemoryKind(Protocol):
    """How a segment of this kind is allocated, protected, handed over and mapped. Descriptors stay the caller's."""

    @property
    def dies_with_holder(self) -> bool:
        """Whether the memory lives only as long as the process that filled it (a descriptor keeps none): that stays,
        no vault keeps anything, and who is granted a segment watches it.
        """

    @property
    def segment_max_nbytes(self) -> int | None:
        """What a segment may be at most; None: as much as there is memory. With the layout it decides every place, so
        it is the same for equal configs.
        """

    def admit(self, nbytes: int) -> Room:
        """The tightest limit, if ``nbytes`` of segments fit under it; InsufficientMemory if not."""

    def resident_nbytes(self, nbytes: int) -> int:
        """What a segment of ``nbytes`` takes of the memory."""

    def allocate(self, nbytes: int, *, name: str) -> int:
        """A descriptor of new memory that may still be written; InsufficientMemory where there is none."""

    def seal(self, fd: int) -> None:
        """Filled: from now on nobody may write. BlockingIOError while somebody still can."""

    def export(self, fd: int) -> int:
        """A descriptor of the same memory for a reader, sharing nothing with another's that matters."""

    def verify(self, fd: int, *, nbytes: int, what: str, read_only: bool = False) -> None:
        """Refuse a descriptor that is not finished memory of ``nbytes``: TransferError naming ``what``."""

    def map_readonly(self, fd: int, *, nbytes: int) -> SegmentMapping:
        """Map for a reader that only looks. TransferError."""

    def map_private(self, fd: int, *, nbytes: int) -> SegmentMapping:
        """Map for an engine: nothing it does reaches anybody else. TransferError."""


def kind_of(config: CacheConfig) -> MemoryKind:
    """The kind of the memory that ``config`` is about, on its device. Asks no driver anything."""
    if config.memory == "host":
        return host
    uuid = config.device.removeprefix(GPU_PREFIX)
    if config.memory == "cuda-ipc":
        from weightcached.protocol.memory import cuda_ipc

        return cuda_ipc.kind_on(uuid)
    from weightcached.protocol.memory import cuda_vmm

    return cuda_vmm.kind_on(uuid)
