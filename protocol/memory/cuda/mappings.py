"""Addresses for a device's memory: reserved, mapped, and readable or writable by its device.

Owns reserving, mapping, access and the way back, and keeping addresses while nothing is mapped there (sleep and wake).
Needs no context. Blocks: giving access takes the driver milliseconds.
"""

from __future__ import annotations

from contextlib import suppress

from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.memory.cuda import driver
from weightcached.protocol.memory.cuda.devices import Device
from weightcached.protocol.memory.cuda.owned import Owned
from weightcached.protocol.memory.cuda.physical import Allocation


class Mapping(Owned):
    """``nbytes`` at ``address``, mapped or only reserved. Given back when closed, or when the last reference goes.

    Whoever hands out memory of it (a tensor) keeps a reference, so that it outlives them all. What still computes with
    the addresses when they are unmapped faults: synchronize first.
    """

    stays_when_refused = True

    def __init__(self, nbytes: int, *, alignment: int, device: Device) -> None:
        """Reserves only. ``nbytes`` and ``alignment`` are multiples of the device's granularity."""
        self.nbytes = nbytes
        self.device = device
        asked = f"addresses for {nbytes} bytes on {device.uuid}"
        self.address = int(driver.call("cuMemAddressReserve", nbytes, alignment, 0, 0, asked=asked))
        self._state = _State()
        self._owns(_give_back, self._state, self.address, nbytes, device.uuid)

    @property
    def mapped(self) -> bool:
        """Whether something is, with access to it."""
        return self._state.mapped and self._state.accessible

    def map(self, allocation: Allocation, *, writable: bool) -> None:
        """Show ``allocation`` (of the same size) here. Its handle may be closed then: the mapping keeps the memory.

        Without ``writable`` a kernel or a copy that writes here fails, and its context with it. After an error nothing
        is mapped.
        """
        if self.closed or self.mapped:
            raise ValueError("the mapping was closed" if self.closed else "something is mapped there already")
        self.unmap()  # what an attempt that failed could not take away
        where = f"{self.nbytes} bytes at {self.address:#x} on {self.device.uuid}"
        driver.call("cuMemMap", self.address, self.nbytes, 0, allocation.handle, 0, asked=f"a mapping of {where}")
        self._state.mapped = True
        cuda = driver.bindings()
        flags = cuda.CUmemAccess_flags
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.ordinal
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        word = "write" if writable else "read"
        try:
            driver.call("cuMemSetAccess", self.address, self.nbytes, [access], 1, asked=f"{word} access to {where}")
        except BaseException:
            with suppress(WeightCacheError):
                self.unmap()
            raise
        self._state.accessible = True

    def unmap(self) -> None:
        """Take the memory away and keep the addresses, for another :meth:`map`. Safe to call twice, and again after
        an error: what is mapped then stays so.
        """
        if self._state.mapped and not self.closed:
            _unmap(self._state, self.address, self.nbytes, self.device.uuid)


class _State:
    """What the finalizer has to know, outside the object that it is of."""

    mapped = False
    accessible = False


def _unmap(state: _State, address: int, nbytes: int, uuid: str) -> None:
    driver.call("cuMemUnmap", address, nbytes, asked=f"unmapping {nbytes} bytes at {address:#x} on {uuid}")
    state.mapped = state.accessible = False


def _give_back(state: _State, address: int, nbytes: int, uuid: str) -> None:
    if state.mapped:
        _unmap(state, address, nbytes, uuid)
    driver.call("cuMemAddressFree", address, nbytes, asked=f"giving back {nbytes} addresses at {address:#x}")
