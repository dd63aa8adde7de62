"""A parameter that is whole in memory, as it was pushed: transformed, written to its place, and digested.

Owns that order, for one thread. What becomes of the values is `quantize.py`'s, slab by slab like in a load, so that a
parameter that was pushed has the bytes that it would have from a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import xxhash

from weightcached.loader.bench import HostBench, bench_of
from weightcached.loader.destination import Destination, Output, Port
from weightcached.loader.layout import Placed
from weightcached.loader.quantize import Transforms, measure
from weightcached.loader.slabs import SLAB_NBYTES, slabs
from weightcached.protocol.dtypes import itemsize_bytes


class Segments(Protocol):
    """What is filled: their memory, and what belongs together there."""

    @property
    def destination(self) -> Destination: ...

    def made_with(self, name: str) -> list[Placed]: ...


class Finishing:
    """``port`` is the thread's own into the segments' destination."""

    def __init__(self, segments: Segments, port: Port) -> None:
        self._segments = segments
        self._port = port
        self._places: dict[str, Placed] = {}
        self._transforms = Transforms(bench_of(port, self._spot))
        self._apart = Transforms(HostBench(None, self._spot))

    def finish(self, placed: Placed, source: memoryview) -> dict[str, bytes]:
        """Write what becomes of ``source``; the digests of the parameter and of all that its quantization made."""
        made = self._segments.made_with(placed.parameter.name)
        self._places = {one.parameter.name: one for one in made}
        hashers = {one.parameter.name: xxhash.xxh3_128() for one in made}
        for one in made:
            self._segments.destination.prepare(one.segment, one.offset, one.offset + one.nbytes)
        for output in _outputs(placed, source, self._transforms):
            if output.room is not None:
                output.room.filled()
            else:
                self._port.write(output.data, *self._spot(output.name, output.offset))
            hashers[output.name].update(output.data)
            if output.room is not None:
                output.room.digested()
        return {name: hasher.digest() for name, hasher in hashers.items()}

    def converted(self, placed: Placed, source: memoryview) -> memoryview:
        """What becomes of ``source``, where that is one parameter, in memory of its own."""
        final = memoryview(bytearray(placed.nbytes))
        for output in _outputs(placed, source, self._apart):
            final[output.offset : output.offset + len(output.data)] = output.data
        return final

    def write(self, placed: Placed, final: memoryview) -> dict[str, bytes]:
        """Write a parameter that is finished, and its digest."""
        hasher = xxhash.xxh3_128()
        self._segments.destination.prepare(placed.segment, placed.offset, placed.offset + placed.nbytes)
        for start in range(0, placed.nbytes, SLAB_NBYTES):
            self._port.write(final[start : start + SLAB_NBYTES], placed.segment, placed.offset + start)
            hasher.update(final[start : start + SLAB_NBYTES])
        return {placed.parameter.name: hasher.digest()}

    def _spot(self, name: str, offset: int) -> tuple[int, int]:
        """Where a byte of what is being finished is: in which segment, and where there."""
        placed = self._places[name]
        return placed.segment, placed.offset + offset


def _outputs(placed: Placed, source: memoryview, transforms: Transforms) -> Iterator[Output]:
    """Each is good until the next is asked for."""
    parameter = placed.parameter
    itemsize = itemsize_bytes(parameter.source_dtype or parameter.dtype)
    matrix = math.prod(parameter.source_shape[-2:])
    largest = 0.0
    for slab in slabs(parameter):
        data = source[slab.first * itemsize : slab.first * itemsize + slab.source_nbytes]
        if slab.step == "measure":
            begins = slab.first % matrix == 0
            largest = max(0.0 if begins else largest, measure(slab, data))
            continue
        yield from transforms.outputs(slab, data, largest=largest)
