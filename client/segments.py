"""A mapped segment as one tensor of its bytes, whatever memory it is; every parameter is a view of that.

Owns the step from an address to torch. The tensor holds the mapping, which goes when the last view of it dies.
Nothing here touches torch's allocator, streams or graphs: memory that it did not allocate is none of their business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from weightcached.protocol.errors import DeviceFailed, TransferError, UnsupportedModel, WeightCacheError
from weightcached.protocol.memory import host
from weightcached.protocol.memory.chosen import CPU, GPU_PREFIX
from weightcached.protocol.memory.kinds import SegmentMapping

if TYPE_CHECKING:
    import torch

    from weightcached.protocol.memory.cuda_ipc import IpcMapping
    from weightcached.protocol.memory.cuda_vmm import DeviceMapping


def on_host(segment: SegmentMapping) -> host.Mapping:
    """The mapping, if the host's processors can use it where it is. UnsupportedModel for a device's memory."""
    if isinstance(segment, host.Mapping):
        return segment
    raise UnsupportedModel(
        "the weights are in a device's memory, which the host cannot address",
        expected="weights of memory kind host",
        next_step="use the tensors, or copy them: tensor.cpu()",
    )


def on_device(segment: SegmentMapping) -> DeviceMapping:
    """The mapping, if it can be taken from its addresses and put back. UnsupportedModel for host memory, which has
    nothing to gain, and for a device's that has no addresses without memory.
    """
    from weightcached.protocol.memory.cuda_vmm import DeviceMapping

    if isinstance(segment, DeviceMapping):
        return segment
    found = "host memory" if isinstance(segment, host.Mapping) else "memory of a GPU that was opened by a handle"
    raise UnsupportedModel(
        "the weights cannot be unmapped and keep their addresses",
        expected="memory kind cuda-vmm",
        found=found,
    )


def unmap(segments: Sequence[DeviceMapping]) -> None:
    """All of them, or none: DeviceFailed where the driver refuses, which says so where that could not be helped."""
    unmapped = []
    try:
        for segment in segments:
            segment.unmap()
            unmapped.append(segment)
    except WeightCacheError as failure:
        try:
            for segment in unmapped:
                segment.remap()
        except WeightCacheError as error:
            raise DeviceFailed(
                "a segment cannot be unmapped, and those that were cannot be mapped again",
                expected=failure.expected,
                found=f"{failure.message}: {failure.found}; then {error.message}: {error.found}",
                next_step="some weights are not mapped: unmap() or remap() tries again; else end this process",
            ) from failure
        raise


def tensor_of(segment: SegmentMapping) -> torch.Tensor:
    """All bytes of the segment as one uint8 tensor, not copied."""
    import torch

    if not segment.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")  # said outright: engines build with another default
    if isinstance(segment, host.Mapping):
        return torch.frombuffer(segment.view(), dtype=torch.uint8)  # the view holds the mapping
    return device_tensor(cast("DeviceMapping | IpcMapping", segment))


def torch_device(device: str) -> torch.device:
    """What torch calls a config's ``device`` in this process. Raises DeviceAbsent for a GPU that it does not see."""
    import torch

    if device == CPU:
        return torch.device("cpu")
    from weightcached.protocol.memory.cuda import devices

    return torch.device("cuda", devices.find(device.removeprefix(GPU_PREFIX)).ordinal)


def device_tensor(segment: DeviceMapping | IpcMapping) -> torch.Tensor:
    """The tensor of a device's segment, by ``__cuda_array_interface__``: torch keeps ``segment`` for its lifetime.

    TransferError where torch has made something else of it: a copy, or a tensor of another device.
    """
    import torch

    device = torch.device("cuda", segment.device.ordinal)
    tensor = torch.as_tensor(segment, device=device)  # said outright: a default device would make it a copy
    if tensor.device != device or tensor.data_ptr() != segment.address:
        raise TransferError(
            "torch did not take a segment as it is",
            expected=f"a tensor at {segment.address:#x} on {device}",
            found=f"one at {tensor.data_ptr():#x} on {tensor.device}",
        )
    return tensor
