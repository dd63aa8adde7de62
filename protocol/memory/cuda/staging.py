"""Host memory that a device copies from while the program goes on: pinned, so that it stays where it is.

Owns allocating it, and pinning memory that is there already. Needs a current context. Pinned memory is taken from the
whole host and cannot be swapped: keep little of it.
"""

from __future__ import annotations

import ctypes
import weakref

from weightcached.protocol.memory.cuda import driver


class Pinned:
    """``nbytes`` of host memory at ``address``. Given back when closed, or when the last reference to it goes.

    No copy may still use it then: wait for the stream first.
    """

    def __init__(self, nbytes: int, *, address: int | None = None) -> None:
        """New memory; with ``address`` the memory there (whole pages, which stay the caller's) is pinned instead.

        Raises InsufficientMemory where the host has no more to pin.
        """
        self.nbytes = nbytes
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
        self._free = weakref.finalize(self, driver.call, back, self.address, asked=asked)
        self._free.atexit = False

    def view(self) -> memoryview:
        """The bytes, writable; keeps the memory alive."""
        if not self._free.alive:
            raise ValueError("the memory was given back")
        block = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        block.owner = self  # type: ignore[attr-defined]  # ctypes arrays take attributes; this one holds the memory
        return memoryview(block).cast("B")

    def close(self) -> None:
        """Give back, or no longer pin. Views of it are invalid from now on. Safe to call twice."""
        self._free()

    def __enter__(self) -> Pinned:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
