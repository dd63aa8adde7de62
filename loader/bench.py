"""Benches: where one thread's arithmetic happens, as tensors over the memory that values come from and go to.

Owns both places. On the host, results lie in rooms that the destination lends, and get where they belong as any bytes
do. On the device that the weights live on, values are brought there as the files have them, results are computed where
they stay, and come back only to be digested. Knows no formula (``arithmetic.py``), and of a device only its port and
who makes tensors over its memory (:class:`Computing`): the arithmetic is the same functions of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weightcached.loader.destination import Output, Port, Room

if TYPE_CHECKING:
    import torch

    from weightcached.protocol.memory.cuda.context import Stream

Spot = Callable[[str, int], tuple[int, int]]
"""(parameter, offset in it) → (segment, offset there)."""


class Result(NamedTuple):
    """Where a parameter's bytes are to be computed, and what they are once :meth:`Bench.working` is left."""

    tensor: torch.Tensor
    """Of uint8; what was there before is of no use."""
    output: Callable[[], Output]


class Bench(Protocol):
    """Of one thread, which works on one slab after the other. Tensors are good until the next slab."""

    def source(self, data: memoryview) -> torch.Tensor:
        """The bytes, as uint8, where they can be computed with. They may be written again when outputs have been asked
        for.
        """
        ...

    def floats(self, count: int) -> torch.Tensor:
        """So many float32 to compute in, whatever they are."""
        ...

    def result(self, name: str, offset: int, nbytes: int) -> Result: ...

    def working(self) -> AbstractContextManager[None]:
        """Tensors are computed with inside of this alone."""
        ...


class Computing(Protocol):
    """How torch computes in a device's memory. One for a device; any thread may call it."""

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """The device's bytes there, as uint8 and not copied. The memory outlives the tensor."""
        ...

    def within(self, stream: Stream) -> AbstractContextManager[None]:
        """What torch is told inside is done after what ``stream`` was given before, and before all it is given then."""
        ...


class DevicePort(Protocol):
    """What works in a device's memory needs of its thread's way there."""

    @property
    def stream(self) -> Stream: ...

    @property
    def computing(self) -> Computing | None:
        """How the device computes; None: the host does it."""
        ...

    def place(self, segment: int, offset: int, nbytes: int) -> int:
        """The device's address of these bytes."""
        ...

    def scratch(self, purpose: str, nbytes: int) -> int:
        """The address of so many bytes of the device besides its segments, until more are asked for that purpose."""
        ...

    def bring(self, address: int, data: memoryview) -> None:
        """Begin copying ``data`` there; good until what is fetched next is here."""
        ...

    def fetch(self, segment: int, offset: int, nbytes: int) -> Room:
        """What the stream's work so far makes of these bytes, brought back: a room that is filled already."""
        ...


class HostBench:
    """The host's processors compute, in the destination's rooms where it has any; without a port, in memory of the
    bench alone.
    """

    def __init__(self, port: Port | None, spot: Spot) -> None:
        self._port = port
        self._spot = spot
        self._floats: torch.Tensor | None = None
        self._bytes = bytearray()

    def source(self, data: memoryview) -> torch.Tensor:
        return over(data)

    def floats(self, count: int) -> torch.Tensor:
        import torch

        if self._floats is None or self._floats.numel() < count:
            self._floats = torch.empty(count, dtype=torch.float32)
        return self._floats[:count]

    def result(self, name: str, offset: int, nbytes: int) -> Result:
        """Memory of its own is used again, since fresh pages cost more than what is computed in them."""
        room = None if self._port is None else self._port.lend(*self._spot(name, offset), nbytes)
        if room is None and len(self._bytes) < nbytes:
            self._bytes = bytearray(nbytes)
        memory = memoryview(self._bytes)[:nbytes] if room is None else room.memory
        return Result(over(memory), lambda: Output(name, offset, memory, room))

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()


class DeviceBench:
    """The device computes, and besides the segments it holds two pieces of scratch memory for a slab of each thread:
    the values as files have them, and as float32.
    """

    def __init__(self, port: DevicePort, computing: Computing, spot: Spot) -> None:
        self._port = port
        self._computing = computing
        self._spot = spot

    def source(self, data: memoryview) -> torch.Tensor:
        address = self._port.scratch("source", len(data))
        self._port.bring(address, data)
        return self._computing.tensor(address, len(data))

    def floats(self, count: int) -> torch.Tensor:
        import torch

        return self._computing.tensor(self._port.scratch("floats", 4 * count), 4 * count).view(torch.float32)

    def result(self, name: str, offset: int, nbytes: int) -> Result:
        segment, start = self._spot(name, offset)
        address = self._port.place(segment, start, nbytes)

        def output() -> Output:
            room = self._port.fetch(segment, start, nbytes)
            return Output(name, offset, room.memory, room)

        return Result(self._computing.tensor(address, nbytes), output)

    def working(self) -> AbstractContextManager[None]:
        return self._computing.within(self._port.stream)


def bench_of(port: Port, spot: Spot) -> Bench:
    """Where a thread with this port computes: where the bytes stay, if that can be."""
    device = port.on_device
    if device is None or device.computing is None:
        return HostBench(port, spot)
    return DeviceBench(device, device.computing, spot)


def over(memory: memoryview) -> torch.Tensor:
    """The host's bytes, as uint8 and not copied."""
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8)
