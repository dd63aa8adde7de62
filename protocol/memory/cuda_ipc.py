"""Memory kind ``cuda-ipc``: a segment is memory that one process, its holder, allocated on a GPU, and that others open.

Owns how the driver's older sharing (``cuda/legacy.py``) makes a kind, for devices and drivers that cannot share by
descriptors. What travels as the segment's descriptor is its *card*: a memfd of the 64 bytes with which a process opens
the memory, sealed like any host memory. The keeper makes the card while it is blank, the worker allocates, fills, and
writes the handle on it, and then stays: it is the holder. Engines are given a read-only descriptor of the card each.

A card keeps nothing. The memory lives while its holder does, whoever has opened it, so nobody who leaves takes anything
from the others, and nobody who stays keeps it. After the holder's end reads are undefined: a client that has opened
memory of this kind watches its holder (``client/holder.py``). Nothing protects it against writing either: an engine
that writes to what it has opened changes what all others see.
"""

from __future__ import annotations

import functools
import os
import weakref

from weightcached.protocol.errors import SwapRefused, TransferError, UnsupportedModel
from weightcached.protocol.memory import host
from weightcached.protocol.memory.cuda import devices
from weightcached.protocol.memory.cuda.context import Context
from weightcached.protocol.memory.cuda.legacy import HANDLE_NBYTES, DeviceMemory, OpenedMemory
from weightcached.protocol.memory.cuda.owned import Owned
from weightcached.protocol.memory.giving_up import give_up
from weightcached.protocol.memory.on_device import DeviceBytes, OnDevice, as_array

CARD_NBYTES = HANDLE_NBYTES


class CudaIpc(OnDevice):
    """The kind on one GPU: see :class:`OnDevice`."""

    dies_with_holder = True
    page_nbytes = 2 << 20
    """What the driver takes at a time. Less would share a page with what else the holder has, which opens with it."""

    def __init__(self, uuid: str) -> None:
        super().__init__(uuid)
        self._held: weakref.WeakValueDictionary[bytes, IpcMapping] = weakref.WeakValueDictionary()

    def allocate(self, nbytes: int, *, name: str) -> int:
        """A blank card. The memory is the holder's to allocate: it takes a context, and dies with whoever does it."""
        return host.allocate(CARD_NBYTES, name=name)

    def hold(self, fd: int, *, nbytes: int) -> IpcMapping:
        """Allocate the memory that the card ``fd`` is for, and write its handle there: this process is the holder, for
        as long as it keeps what is returned. Its bytes are whatever they were before.

        Raises InsufficientMemory, DeviceAbsent, DeviceFailed; nothing is held then.
        """
        context = Context(self.device)
        try:
            with context.current():
                memory = DeviceMemory(self.resident_nbytes(nbytes), device=self.device)
        except BaseException:
            give_up(context)
            raise
        held = IpcMapping(context, memory, nbytes=nbytes)
        try:
            with context.current():
                handle = memory.export()
            os.pwrite(fd, handle, 0)
        except BaseException:
            give_up(held)
            raise
        self._held[handle] = held
        return held

    def seal(self, fd: int) -> None:
        """The card cannot change from now on. The memory can: see above."""
        host.seal(fd)

    def export(self, fd: int) -> int:
        """A descriptor of the card for one reader."""
        return host.export(fd)

    def verify(self, fd: int, *, nbytes: int, what: str, read_only: bool = False) -> None:
        """Refuse what is no sealed card. What it stands for shows when it is opened, its size never: no call tells."""
        host.verify(fd, nbytes=CARD_NBYTES, what=f"the card of {what}", read_only=read_only)

    def map_readonly(self, fd: int, *, nbytes: int) -> IpcMapping:
        """Open the memory, or what this process holds itself: no driver opens that. Only good behaviour keeps it as it
        is. Raises DeviceFailed where the holder has ended.
        """
        handle = os.pread(fd, CARD_NBYTES, 0)
        held = self._held.get(handle)
        if held is not None and not held.closed:
            return held
        if len(handle) != HANDLE_NBYTES or not any(handle):
            raise TransferError("a segment's card is blank", expected=f"{HANDLE_NBYTES} bytes of a handle")
        context = Context(self.device)
        try:
            with context.current():
                opened = OpenedMemory(handle, nbytes=self.resident_nbytes(nbytes))
        except BaseException:
            give_up(context)
            raise
        return IpcMapping(context, opened, nbytes=nbytes)

    map_private = map_readonly
    """There is no copy-on-write: an engine that writes needs a copy."""


@functools.cache
def kind_on(uuid: str) -> CudaIpc:
    """The kind on this GPU: one object for a process, which remembers what it holds."""
    return CudaIpc(uuid)


class IpcMapping(Owned):
    """A segment in this process's device addresses, and the context that it needs: the holder's own memory, or
    another's, opened. Given back when closed, or when the last reference goes; whatever computes there must have ended.
    """

    def __init__(self, context: Context, memory: DeviceMemory | OpenedMemory, *, nbytes: int) -> None:
        """Takes both over."""
        self.nbytes = nbytes
        self.resident_nbytes = memory.nbytes
        self.address = memory.address
        self.device: devices.Device = context.device
        self.context = context
        self._kept: object = None
        self._owns(_give_back, memory, context)

    def keep(self, companion: object) -> None:
        """Hold a reference to ``companion`` for as long as there may be readers here."""
        self._kept = companion

    def close(self) -> None:
        """Give it back now. Safe to call twice."""
        super().close()
        self._kept = None

    def view(self) -> DeviceBytes:
        """Its bytes, copied to the host piece by piece as they are asked for."""
        if self.closed:
            raise ValueError("the mapping was closed")
        return DeviceBytes(self)

    def revert(self) -> None:
        """Raises UnsupportedModel: there are no pages of one's own."""
        raise UnsupportedModel(
            "nothing can be undone that was written to memory of kind cuda-ipc: it is what all engines have",
            expected="weights of memory kind host or cuda-vmm",
            next_step="write to copies only (weights.copies()); restart the daemon to have the weights as they were",
        )

    def exchange(self, other: IpcMapping) -> None:
        """Raises SwapRefused: an address is the driver's, and stands for this memory alone."""
        raise SwapRefused(
            "memory of kind cuda-ipc has no other at its addresses",
            expected="weights of memory kind host or cuda-vmm",
            found="memory that was opened by a handle",
            next_step="restart the engine to change over to what is served now",
        )

    def written(self) -> list[tuple[int, int]]:
        """None: there are no pages of one's own."""
        return []

    def settle(self) -> None:
        """Wait for whatever this process still computes with the device."""
        with self.context.current():
            self.context.synchronize()

    def populate(self) -> None:
        """Nothing to do: the driver maps all of it at once."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """One array of bytes."""
        if self.closed:
            raise ValueError("the mapping was closed")
        return as_array(self)


def _give_back(memory: Owned, context: Context) -> None:
    with context:
        memory.close()
