"""CUDA's calls, checked: each does what it says, and each failure of each becomes an error that names it."""

from __future__ import annotations

import ctypes
import os

from tests.support.fakecuda import GRANULARITY
from weightcached.protocol.memory.cuda import devices, nvml, physical
from weightcached.protocol.memory.cuda.mappings import Mapping


def test_memory_made_here_is_read_elsewhere_through_a_descriptor(cuda_here):
    device = devices.find(None)
    with (
        physical.allocate(GRANULARITY, device=device) as memory,
        Mapping(GRANULARITY, alignment=0, device=device) as at,
    ):
        at.map(memory, writable=True)
        ctypes.memset(at.address, 7, 16)
        fd = memory.export()
    assert cuda_here.fake.used_nbytes() == GRANULARITY
    again = physical.from_descriptor(fd, nbytes=GRANULARITY, device=device)
    os.close(fd)
    with Mapping(GRANULARITY, alignment=0, device=device) as at:
        at.map(again, writable=False)
        again.close()
        assert ctypes.string_at(at.address, 16) == b"\7" * 16
    assert cuda_here.fake.used_nbytes() == 0
    assert nvml.memory(device.uuid).used_nbytes == 0
