"""A device's memory as such, without addresses: it lives while a handle, a mapping or an exported descriptor does.

Owns allocating, exporting and importing it. Needs no context, so a keeper that has none uses it. Where it is mapped is
the matter of ``mappings``. That a descriptor alone keeps the memory is NVIDIA's word; tests/gpu/probe.py is how to see
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from weightcached.protocol.errors import InsufficientMemory, InvalidOption
from weightcached.protocol.memory.cuda import driver, nvml
from weightcached.protocol.memory.cuda.devices import Device
from weightcached.protocol.memory.cuda.owned import Owned

LARGEST_VARIABLE = "WEIGHTCACHED_SEGMENT_MAX_BYTES"
"""Names the environment's word on how large an allocation may be, for a driver that is found to give less in one piece
than there is. It moves every place, so all daemons of a group, and engines that load from disk, are given the same."""


def properties(device: Device) -> Any:
    """What is asked of all memory here: pinned, on ``device``, to be exported as a POSIX descriptor."""
    cuda = driver.bindings()
    wanted = cuda.CUmemAllocationProp()
    wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device.ordinal
    return wanted


def granularity(device: Device) -> int:
    """Sizes of allocations, and addresses and sizes of mappings, are multiples of this many bytes (2 MiB, usually)."""
    recommended = driver.bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    asked = f"the granularity of memory on {device.uuid}"
    return int(driver.call("cuMemGetAllocationGranularity", properties(device), recommended, asked=asked))


def rounded(nbytes: int, multiple: int) -> int:
    """``nbytes`` rounded up to a multiple of the granularity; at least one."""
    return max(-(-nbytes // multiple), 1) * multiple


def largest_nbytes(page_nbytes: Callable[[], int]) -> int | None:
    """The most that one allocation may be, in whole pages. None where nobody says so: the driver names no limit but the
    device itself, and whoever allocates more than that is told what holds its memory.

    ``page_nbytes`` is called only where there is a limit. InvalidOption where :data:`LARGEST_VARIABLE` is less than
    that.
    """
    said = os.environ.get(LARGEST_VARIABLE)
    if said is None:
        return None
    multiple = page_nbytes()
    if not (said.isascii() and said.isdecimal()) or int(said) < multiple:
        raise InvalidOption(
            f"unusable {LARGEST_VARIABLE}", expected=f"a number of bytes, {multiple} at least", found=said
        )
    return int(said) // multiple * multiple


class Allocation(Owned):
    """A handle of ``nbytes`` on ``device``. Released when closed, or when the last reference to it goes.

    Releasing frees the memory only when no mapping, no exported descriptor and no other handle of it is left, in any
    process.
    """

    stays_when_refused = True

    def __init__(self, handle: int, *, nbytes: int, device: Device) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.device = device
        asked = f"the release of {nbytes} bytes on {device.uuid}"
        self._owns(driver.call, "cuMemRelease", handle, asked=asked)

    def export(self) -> int:
        """A descriptor of this memory, closed on exec. The caller owns it; alone it keeps the memory."""
        kind = driver.bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        asked = f"a descriptor of {self.nbytes} bytes on {self.device.uuid}"
        fd = int(driver.call("cuMemExportToShareableHandle", self.handle, kind, 0, asked=asked))
        os.set_inheritable(fd, False)
        return fd


def allocate(nbytes: int, *, device: Device) -> Allocation:
    """New memory; ``nbytes`` is a multiple of :func:`granularity`. Its bytes are whatever they were before.

    Raises InsufficientMemory, naming who holds the device's memory where NVML knows.
    """
    asked = f"{nbytes} bytes on {device.uuid} ({device.name})"
    try:
        handle = driver.call("cuMemCreate", nbytes, properties(device), 0, asked=asked)
    except InsufficientMemory as error:
        raise nvml.no_room(error, asked=asked, uuid=device.uuid) from error
    return Allocation(int(handle), nbytes=nbytes, device=device)


def from_descriptor(fd: int, *, nbytes: int, device: Device) -> Allocation:
    """The memory behind a descriptor that :meth:`Allocation.export` gave, in any process. ``fd`` stays the caller's.

    ``nbytes`` is what its maker said: the driver does not tell, and refuses a mapping of more.
    """
    kind = driver.bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    asked = f"{nbytes} bytes on {device.uuid} from a descriptor"
    handle = driver.call("cuMemImportFromShareableHandle", fd, kind, asked=asked)
    return Allocation(int(handle), nbytes=nbytes, device=device)
