"""torch on the device that weights live on: tensors over its memory, and torch's work in the order of our streams.

Owns whether torch can compute there, with the reason in words, and the step from an address to a tensor. torch is
imported when somebody asks. Its own allocator serves what arithmetic needs in passing, in the same context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weightcached.protocol.errors import DeviceFailed
from weightcached.protocol.memory.cuda.context import Stream
from weightcached.protocol.memory.cuda.devices import Device

if TYPE_CHECKING:
    import torch


def computing_on(device: Device) -> tuple[TorchOnDevice | None, str]:
    """How torch computes on ``device``, or None where it cannot, and why it is so."""
    import torch

    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} has no CUDA, or finds no device"
    if device.ordinal >= torch.cuda.device_count():
        return None, f"torch sees {torch.cuda.device_count()} devices, and not {device.uuid}"
    seen = str(torch.cuda.get_device_properties(device.ordinal).uuid).lower()
    if seen != device.uuid:
        return None, f"torch's device {device.ordinal} is {seen}, and not {device.uuid}"
    return TorchOnDevice(device.ordinal), f"torch {torch.__version__} computes on it"


class TorchOnDevice:
    """torch with CUDA, on the device that it calls ``cuda:ordinal``."""

    def __init__(self, ordinal: int) -> None:
        import torch

        self._device = torch.device("cuda", ordinal)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        import torch

        made = torch.as_tensor(DeviceArray(address, nbytes), device=self._device)
        if made.device != self._device or made.data_ptr() != address:
            raise DeviceFailed(
                "torch did not take a device's memory as it is",
                expected=f"a tensor at {address:#x} on {self._device}",
                found=f"one at {made.data_ptr():#x} on {made.device}",
                next_step="report this, with torch's version",
            )
        return made

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        import torch

        ours = torch.cuda.ExternalStream(stream.handle, device=self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(ours):
            yield


class DeviceArray:
    """An array of a device's bytes, for whoever takes such: torch, kvikio."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
