"""Host memory that a device copies from while the program goes on: pinned, so that it stays where it is.

Owns allocating it, and pinning memory that is there already. Needs a current context. Pinned memory is taken from the
whole host and cannot be swapped: keep little of it.
"""

from __future__ import annotations

import ctypes

from weightcached.protocol.memory.cuda import driver
from weightcached.protocol.memory.cuda.owned import Owned, call_within, current_context


class Pinned(Owned):
    """``nbytes`` of host memory at ``address``. Before it is closed, wait for the copies that use it."""

    def __init__(self, nbytes: int, *, address: int | None = None) -> None:
        """New memory; with ``address`` the memory there (whole pages, which stay the caller's) is pinned instead.

        Raises InsufficientMemory where the host has no more to pin.
        """
        self.nbytes = nbytes
        context = current_context()
        if address is None:
            flag = int(driver.bindings().CU_MEMHOSTALLOC_PORTABLE)
            self.address = int(driver.call("cuMemHostAlloc", nbytes, flag, asked=f"{nbytes} bytes of pinned memory"))
            back = "cuMemFreeHost"
        else:
            self.address = address
            flag = int(driver.bindings().CU_MEMHOSTREGISTER_PORTABLE)
            driver.call("cuMemHostRegister", address, nbytes, flag, asked=f"{nbytes} bytes at {address:#x} pinned")
            back = "cuMemHostUnregister"
        asked = f"giving back {nbytes} bytes of pinned memory at {self.address:#x}"
        self._owns(call_within, context, back, self.address, asked=asked)

    def view(self) -> memoryview:
        """The bytes, writable; keeps the memory alive, and is invalid once that is closed."""
        if self.closed:
            raise ValueError("the memory was given back")
        block = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        block.owner = self  # type: ignore[attr-defined]  # ctypes arrays take attributes; this one holds the memory
        return memoryview(block).cast("B")
