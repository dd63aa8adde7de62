"""From a source into a segment of whatever memory kind.

Owns mapping a device's segment for as long as it is filled, and nobody else's being able to write there afterwards. The
worker calls it for memory that will be published, the disk fallback for memory of its own process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from weightcached.loader.destination import Target
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.memory import host
from weightcached.protocol.memory.kinds import MemoryKind


@contextmanager
def to_be_filled(segment: int, kind: MemoryKind, *, nbytes: int) -> Iterator[Target]:
    """What fills ``segment``, a descriptor of memory of ``kind`` that may still be written, takes for it.

    It is not mapped afterwards. But memory that dies with its holder is held by this process from then on, for as long
    as it keeps what it was given here; no longer where the block fails. Raises TransferError, DeviceAbsent and
    DeviceFailed where a device cannot be used, and InsufficientMemory.
    """
    if kind is host:
        yield segment
        return
    from weightcached.loader.device import DeviceSegment
    from weightcached.protocol.memory.cuda.context import Context
    from weightcached.protocol.memory.cuda_ipc import CudaIpc
    from weightcached.protocol.memory.cuda_vmm import CudaVmm

    if isinstance(kind, CudaIpc):
        held = kind.hold(segment, nbytes=nbytes)
        try:
            yield DeviceSegment(held.context, held.address, nbytes=held.resident_nbytes, memory=held)
        except BaseException:
            with suppress(WeightCacheError):  # of a device that failed, what else fails now is not what matters
                held.close()
            raise
        return
    if not isinstance(kind, CudaVmm):
        raise TypeError(f"nobody has said how to fill {kind}")
    with Context(kind.device) as context, closing(kind.map_shared(segment, nbytes=nbytes)) as mapping:
        yield DeviceSegment(context, mapping.address, nbytes=mapping.resident_nbytes)
