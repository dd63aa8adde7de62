"""A device's memory for tests and for tests/gpu: mapped, read and written by the project's own calls of the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from weightcached.protocol.memory.cuda import devices, physical
from weightcached.protocol.memory.cuda.context import Context, Stream
from weightcached.protocol.memory.cuda.mappings import Mapping
from weightcached.protocol.memory.cuda.staging import Pinned

_PIECE_NBYTES = 64 << 20


@dataclass(frozen=True)
class Mapped:
    """``nbytes`` mapped at ``address`` (whole pages of the device, so perhaps more than was asked for)."""

    context: Context
    allocation: physical.Allocation
    address: int
    nbytes: int


@contextmanager
def mapped(uuid: str | None, nbytes: int, *, fd: int | None = None, writable: bool = True) -> Iterator[Mapped]:
    """New memory, or that behind ``fd`` of as many bytes, mapped, with the context current in this thread."""
    device = devices.find(uuid)
    multiple = physical.granularity(device)
    rounded = physical.rounded(nbytes, multiple)
    with ExitStack() as held:
        context = held.enter_context(Context(device))
        held.enter_context(context.current())
        if fd is None:
            allocation = held.enter_context(physical.allocate(rounded, device=device))
        else:
            allocation = held.enter_context(physical.from_descriptor(fd, nbytes=rounded, device=device))
        mapping = held.enter_context(Mapping(rounded, alignment=multiple, device=device))
        mapping.map(allocation, writable=writable)
        yield Mapped(context, allocation, mapping.address, rounded)


def read(address: int, nbytes: int) -> memoryview:
    """The device's bytes, copied to the host. The context is current."""
    found = memoryview(bytearray(nbytes))
    for start, pinned, stream in _pieces(nbytes):
        some = min(pinned.nbytes, nbytes - start)
        stream.copy_out(pinned.address, address + start, some)
        stream.synchronize()
        found[start : start + some] = pinned.view()[:some]
    return found


def write(address: int, data: bytes | memoryview) -> None:
    """The bytes, brought to the device. The context is current."""
    for start, pinned, stream in _pieces(len(data)):
        some = min(pinned.nbytes, len(data) - start)
        pinned.view()[:some] = data[start : start + some]
        stream.copy_in(address + start, pinned.address, some)
        stream.synchronize()


def _pieces(nbytes: int) -> Iterator[tuple[int, Pinned, Stream]]:
    """Where each piece begins, the memory that it goes through, and a stream."""
    if not nbytes:
        return
    with Pinned(min(nbytes, _PIECE_NBYTES)) as pinned, closing(Stream()) as stream:
        for start in range(0, nbytes, pinned.nbytes):
            yield start, pinned, stream
