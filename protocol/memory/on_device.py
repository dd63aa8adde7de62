"""What the memory kinds of a GPU have in common, whoever allocates it and however it is handed over.

Owns the device of a kind and measuring what is free there, a mapped segment's bytes as the host can read them, and the
description by which torch takes them. ``cuda_vmm.py`` and ``cuda_ipc.py`` are the kinds.
"""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from typing import Protocol

from weightcached.protocol.errors import DeviceAbsent, DeviceFailed, InsufficientMemory
from weightcached.protocol.memory.admission import Room
from weightcached.protocol.memory.cuda import devices, nvml, physical
from weightcached.protocol.memory.cuda.context import Context, Stream


class OnDevice(ABC):
    """On the GPU with this UUID, as far as this process sees it. Made without asking the driver anything."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid

    @functools.cached_property
    def device(self) -> devices.Device:
        """As this process calls it. DeviceAbsent where it does not see it."""
        return devices.find(self.uuid)

    @property
    @abstractmethod
    def page_nbytes(self) -> int:
        """Segments take whole multiples of it."""

    @functools.cached_property
    def segment_max_nbytes(self) -> int | None:
        """What one allocation may be."""
        return physical.largest_nbytes(lambda: self.page_nbytes)

    def resident_nbytes(self, nbytes: int) -> int:
        """``nbytes`` in whole pages of the device."""
        return physical.rounded(nbytes, self.page_nbytes)

    def admit(self, nbytes: int) -> Room:
        """What the device has free; InsufficientMemory, naming who holds it, where that is too little.

        Without NVML all that is known is how large the device is. Allocation then decides: it takes the memory at once.
        """
        needed = self.resident_nbytes(nbytes)
        try:
            found = nvml.memory(self.uuid)
            room = Room(f"free memory of GPU {self.uuid}", found.free_nbytes, found.total_nbytes)
        except (DeviceAbsent, DeviceFailed):
            total = self.device.nbytes
            room = Room(f"all memory of GPU {self.uuid}: what is free is not known", total, total)
        if needed > room.free_nbytes:
            full = InsufficientMemory("the device has no room", found=f"{room.free_nbytes} bytes free")
            raise nvml.no_room(full, asked=f"{needed} bytes on {self.uuid} ({self.device.name})", uuid=self.uuid)
        return room


class OfDevice(Protocol):
    """A segment at ``address`` of a device's addresses in this process."""

    nbytes: int
    address: int
    device: devices.Device


class DeviceBytes:
    """A mapped segment as the host sees it: a slice is a copy. Any thread may ask; each has a stream of its own.

    Keeps the device's primary context, which torch uses too, for as long as it is kept.
    """

    def __init__(self, mapping: OfDevice) -> None:
        self._mapping = mapping
        self._context = Context(mapping.device)

    def __len__(self) -> int:
        return self._mapping.nbytes

    def __getitem__(self, piece: slice, /) -> memoryview:
        start, stop, step = piece.indices(len(self))
        if step != 1:
            raise ValueError("bytes of a device come in one piece")
        copied = memoryview(bytearray(max(stop - start, 0)))
        if copied:
            with self._context.current(), Stream() as stream:
                stream.copy_out(address_of(copied), self._mapping.address + start, len(copied))
                stream.synchronize()
        return copied


def address_of(memory: memoryview) -> int:
    """Of contiguous host memory, which has to stay alive while the address is used."""
    if not memory.readonly:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    raise ValueError("memory that is read-only has no address here")


def as_array(mapping: OfDevice) -> dict[str, object]:
    """``__cuda_array_interface__`` of one array of bytes. Never marked read-only: torch takes no arrays that are."""
    return {
        "shape": (mapping.nbytes,),
        "typestr": "|u1",
        "data": (mapping.address, False),
        "strides": None,
        "version": 3,
    }
