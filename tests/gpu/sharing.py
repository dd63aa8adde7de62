"""Rows about handing memory to another process: how long that takes, by descriptor and by handle."""

from __future__ import annotations

import os
import statistics
import time

from tests.gpu.row import GIB, Row, Setting, child, in_words, line_of
from tests.support import device_memory as memory
from weightcached.protocol.memory.cuda import devices, physical
from weightcached.protocol.memory.cuda.context import Context
from weightcached.protocol.memory.cuda.legacy import DeviceMemory
from weightcached.protocol.memory.cuda.mappings import Mapping

SIZES = (GIB // 10, GIB, 10 * GIB)
TARGET_S = 0.020
TIMES = 5
OPENED_TIMES = 3
"""By a process each."""


def by_descriptor(setting: Setting) -> str:
    """Import, reserve, map and give access, read-only; and all the way back. Medians."""
    device = devices.find(setting.uuid)
    multiple = physical.granularity(device)
    figures, slowest_s = [], 0.0
    for size in SIZES:
        nbytes = physical.rounded(setting.nbytes(size), multiple)
        with physical.allocate(nbytes, device=device) as allocation:
            fd = allocation.export()
        try:
            there, back = [], []
            for _ in range(TIMES):
                started_s = time.perf_counter()
                with physical.from_descriptor(fd, nbytes=nbytes, device=device) as imported:
                    mapping = Mapping(nbytes, alignment=multiple, device=device)
                    mapping.map(imported, writable=False)
                there.append(time.perf_counter() - started_s)
                mapping.close()
                back.append(time.perf_counter() - started_s - there[-1])
        finally:
            os.close(fd)
        slowest_s = max(slowest_s, statistics.median(there))
        figures.append(f"{in_words(nbytes)}: {_ms(there)}, back {_ms(back)}")
    return setting.judged(figures, {f"{TARGET_S * 1e3:.0f} ms at most": slowest_s <= TARGET_S})


def by_handle(setting: Setting) -> str:
    """Memory of this process (the holder) opened by another."""
    device = devices.find(setting.uuid)
    figures = []
    with Context(device) as context, context.current():
        for size in SIZES:
            nbytes = setting.nbytes(size)
            with DeviceMemory(nbytes, device=device) as held:
                memory.write(held.address, b"held")
                seconds = []
                for _ in range(OPENED_TIMES):
                    with child("tests.gpu.peer", "opened", setting.uuid, str(nbytes), held.export().hex()) as engine:
                        seconds.append(float(line_of(engine)))
                        engine.communicate()
            figures.append(f"{in_words(nbytes)}: {_ms(seconds)}")
    return "; ".join(figures)


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms"


ROWS = (
    Row("map", "mapping a segment takes milliseconds, whatever its size", by_descriptor),
    Row("open", "a handle of legacy memory is opened by another process", by_handle),
)
