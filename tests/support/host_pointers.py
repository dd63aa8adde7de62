"""torch on a device whose addresses are the host's: for the driver that needs no GPU, and with torch that has no CUDA.

The tensors are real, over the very bytes that driver calls device memory; what a GPU's processors would do, the host's
do. So everything around the arithmetic is tried on bytes: what is brought, in which order, where it lands.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weightcached.protocol.memory.cuda.context import Stream


class HostPointers:
    """A ``Computing``. ``computed`` counts the slabs: that it was used at all."""

    def __init__(self) -> None:
        self.computed = 0

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """The driver puts a stream's work off until somebody waits, and torch here knows nothing of streams."""
        stream.synchronize()
        self.computed += 1
        yield
