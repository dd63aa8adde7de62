"""Where weights are to live, as options say it: a device and a memory kind, the same words on both sides.

Owns the words, and turning what somebody typed (an index of this process, the beginning of a UUID) into the one
identity that is compared, written down and sent. An ordinal never leaves the process in which it means something.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from weightcached.protocol.errors import DeviceAbsent, DeviceFailed, InsufficientMemory, InvalidOption

Memory = Literal["host", "cuda-vmm", "cuda-ipc"]

CPU = "cpu"
GPU_PREFIX = "gpu-"
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
DEVICE_PATTERN = rf"^(?:{CPU}|{GPU_PREFIX}{_UUID})$"
DEVICE_SPELLINGS = "cpu, cuda (the only GPU that is visible), cuda:INDEX (of those visible), or cuda:UUID"
_WHOLE_UUID = re.compile(rf"(?:gpu-|mig-)?({_UUID})", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Chosen:
    """``device`` is ``cpu``, or ``gpu-`` and the UUID: the device word of a GPU's place, too."""

    memory: Memory
    device: str
    reason: str = field(default="the device's own kind", compare=False)
    """Why this kind, for a log."""

    @property
    def option(self) -> str:
        """The device as an option that means the same in any process: ``cpu``, or ``cuda:`` and the whole UUID."""
        return CPU if self.device == CPU else f"cuda:{self.device.removeprefix(GPU_PREFIX)}"


HOST = Chosen("host", CPU)


def chosen(device: str, memory: str | None = None) -> Chosen:
    """What these options mean: :func:`device_named`, and of that :func:`kind_on`. Raises what they raise."""
    return kind_on(device_named(device, memory), memory)


def device_named(device: str, memory: str | None = None) -> str:
    """The device that these options are about, as :class:`Chosen` has it, and whether the two go together.

    A whole UUID is believed, and found out about when the device is used: places are named, and kept weights adopted,
    without a driver. Anything less asks the driver, which imports ``cuda-bindings`` and initialises it. Raises
    InvalidOption, and DeviceAbsent for a GPU that this process does not see.
    """
    word, _, which = device.partition(":")
    if device != CPU and word != "cuda":
        raise InvalidOption("unusable device", expected=DEVICE_SPELLINGS, found=device)
    if memory is not None and (memory not in get_args(Memory) or (memory == "host") != (device == CPU)):
        expected = "host" if device == CPU else ", ".join(one for one in get_args(Memory) if one != "host")
        raise InvalidOption(f"unusable memory kind on {device}", expected=expected, found=memory)
    return CPU if device == CPU else GPU_PREFIX + _uuid(which if ":" in device else None)


def kind_on(device: str, memory: str | None = None) -> Chosen:
    """The kind of memory on ``device``, which :func:`device_named` gave. Without ``memory`` it is the device's own: of
    a GPU ``cuda-vmm``, and ``cuda-ipc`` where the device or its driver says that it cannot do that. Both sides ask the
    same device, so they agree. Where the driver does not answer it is ``cuda-vmm``, with the driver's reason: whoever
    uses the device meets that again, and fails by it.

    Blocks for as long as the driver takes; asks none where ``memory`` says the kind.
    """
    if device == CPU:
        return HOST
    if memory is not None:
        return Chosen(memory, device, "it was asked for")  # type: ignore[arg-type]  # checked
    from weightcached.protocol.memory.cuda import devices

    try:
        obstacle = devices.why_no_descriptors(devices.find(device.removeprefix(GPU_PREFIX)))
    except (DeviceAbsent, DeviceFailed, InsufficientMemory) as error:
        return Chosen("cuda-vmm", device, f"the driver cannot be asked yet whether the GPU can do it: {error}")
    if obstacle is None:
        return Chosen("cuda-vmm", device)
    return Chosen("cuda-ipc", device, obstacle)


def _uuid(which: str | None) -> str:
    if which is not None and (whole := _WHOLE_UUID.fullmatch(which)):
        return whole[1].lower()
    from weightcached.protocol.memory.cuda import devices

    return devices.find(which).uuid
