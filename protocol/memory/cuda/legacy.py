"""A device's memory the older way: it has an address from the start, and dies with the process that allocated it.

Owns allocating it (the holder), the 64 bytes that let another process open it, and opening them (an engine). Needs a
current context on both sides. Nothing protects what is opened against writing, and reads are undefined once the holder
is dead.
"""

from __future__ import annotations

import ctypes

from weightcached.protocol.errors import InsufficientMemory, TransferError
from weightcached.protocol.memory.cuda import driver, nvml
from weightcached.protocol.memory.cuda.devices import Device
from weightcached.protocol.memory.cuda.owned import Owned, call_within, current_context

HANDLE_NBYTES = 64


class DeviceMemory(Owned):
    """``nbytes`` at ``address`` on ``device``. Closing frees it, whoever has opened it."""

    def __init__(self, nbytes: int, *, device: Device) -> None:
        """Raises InsufficientMemory, naming who holds the device's memory where NVML knows."""
        self.nbytes = nbytes
        asked = f"{nbytes} bytes on {device.uuid} ({device.name})"
        context = current_context()
        try:
            self.address = int(driver.call("cuMemAlloc", nbytes, asked=asked))
        except InsufficientMemory as error:
            raise nvml.no_room(error, asked=asked, uuid=device.uuid) from error
        freed = f"freeing {nbytes} bytes at {self.address:#x}"
        self._owns(call_within, context, "cuMemFree", self.address, asked=freed)

    def export(self) -> bytes:
        """64 bytes with which a process of the same user may open this memory, while this process lives."""
        asked = f"a handle of {self.nbytes} bytes at {self.address:#x}"
        return ctypes.string_at(
            int(driver.call("cuIpcGetMemHandle", self.address, asked=asked).getPtr()), HANDLE_NBYTES
        )


class OpenedMemory(Owned):
    """Another process's memory at ``address``."""

    def __init__(self, handle: bytes, *, nbytes: int) -> None:
        """``handle`` as :meth:`DeviceMemory.export` gave it; ``nbytes`` as its holder said, for messages."""
        if len(handle) != HANDLE_NBYTES:
            raise TransferError("not a handle of memory", expected=f"{HANDLE_NBYTES} bytes", found=len(handle))
        self.nbytes = nbytes
        cuda = driver.bindings()
        opened = cuda.CUipcMemHandle()
        ctypes.memmove(int(opened.getPtr()), handle, HANDLE_NBYTES)
        flag = int(cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        asked = f"{nbytes} bytes of another process"
        context = current_context()
        self.address = int(driver.call("cuIpcOpenMemHandle", opened, flag, asked=asked))
        closing = f"closing {nbytes} bytes at {self.address:#x}"
        self._owns(call_within, context, "cuIpcCloseMemHandle", self.address, asked=closing)
