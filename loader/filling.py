"""From a source into segments of whatever memory kind.

Owns mapping a device's segments for as long as they are filled, and nobody else's being able to write there afterwards.
The worker calls it for memory that will be published, the disk fallback for memory of its own process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from weightcached.loader.destination import Target
from weightcached.protocol.memory import host
from weightcached.protocol.memory.giving_up import give_up
from weightcached.protocol.memory.kinds import MemoryKind

if TYPE_CHECKING:
    from weightcached.loader.bench import Computing
    from weightcached.protocol.memory.cuda.devices import Device

log = logging.getLogger(__name__)


@contextmanager
def to_be_filled(
    segments: Sequence[int], kind: MemoryKind, *, nbytes: Sequence[int], computes: bool = False
) -> Iterator[Target]:
    """What fills ``segments``, descriptors of memory of ``kind`` that may still be written, takes for them; each is of
    so many ``nbytes``. ``computes``: values will be cast or quantized on the way.

    They are not mapped afterwards. But memory that dies with its holder is held by this process from then on, for as
    long as it keeps what it was given here; no longer where the block fails. Raises TransferError, DeviceAbsent and
    DeviceFailed where a device cannot be used, and InsufficientMemory.
    """
    if kind is host:
        yield segments
        return
    from weightcached.loader.device import DeviceSegments, Span
    from weightcached.protocol.memory.cuda.context import Context
    from weightcached.protocol.memory.cuda_ipc import CudaIpc
    from weightcached.protocol.memory.cuda_vmm import CudaVmm

    if not isinstance(kind, CudaIpc | CudaVmm):
        raise TypeError(f"nobody has said how to fill {kind}")
    computing = _computing(kind.device) if computes else None
    if isinstance(kind, CudaIpc):
        with ExitStack() as unwanted:
            held = []
            for segment, size in zip(segments, nbytes, strict=True):
                held.append(kind.hold(segment, nbytes=size))
                unwanted.callback(give_up, held[-1])
            spans = [Span(one.address, one.resident_nbytes) for one in held]
            yield DeviceSegments(held[0].context, spans, computing=computing, memory=held)
            unwanted.pop_all()
        return
    with Context(kind.device) as context, ExitStack() as mapped:
        spans = []
        for segment, size in zip(segments, nbytes, strict=True):
            mapping = mapped.enter_context(kind.map_shared(segment, nbytes=size))
            spans.append(Span(mapping.address, mapping.resident_nbytes))
        yield DeviceSegments(context, spans, computing=computing)


def _computing(device: Device) -> Computing | None:
    """How the device computes, if it can; the log says which and why."""
    from weightcached.loader.computing import computing_on

    computing, why = computing_on(device)
    log.info("arithmetic: on %s: %s", "the host" if computing is None else f"GPU {device.uuid}", why)
    return computing
