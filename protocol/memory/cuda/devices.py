"""The devices that this process sees, known by their UUID.

Owns listing them and finding the one that somebody asked for. An ordinal means something in this process only (it
depends on ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``, which the driver itself applies), so it never leaves it:
what is compared, written down or sent is the UUID.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from weightcached.protocol.errors import DeviceAbsent, InvalidOption
from weightcached.protocol.memory.cuda import driver

_PREFIX = re.compile(r"(?:gpu-|mig-)?([0-9a-f-]{4,36})", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Device:
    """``uuid`` is its identity on every side: lowercase, with hyphens and without ``GPU-`` or ``MIG-``.

    ``ordinal`` is what this process, torch included, calls it. ``nbytes`` is all the memory it has. A MIG instance is a
    device of its own.
    """

    ordinal: int
    uuid: str
    name: str
    nbytes: int


def devices() -> tuple[Device, ...]:
    """Those this process sees, by ordinal. Makes no context. Raises DeviceAbsent where there is none."""
    driver.initialise()
    count = driver.call("cuDeviceGetCount", asked="the number of devices")
    return tuple(_device(ordinal) for ordinal in range(count))


def _device(ordinal: int) -> Device:
    asked = f"device {ordinal}"
    handle = driver.call("cuDeviceGet", ordinal, asked=asked)
    identity = driver.call("cuDeviceGetUuid", handle, asked=f"the UUID of {asked}")
    name = driver.call("cuDeviceGetName", 128, handle, asked=f"the name of {asked}")
    return Device(
        ordinal=ordinal,
        uuid=str(uuid.UUID(bytes=bytes(identity.bytes)[:16])),
        name=name.split(b"\0", 1)[0].decode(errors="replace"),
        nbytes=driver.call("cuDeviceTotalMem", handle, asked=f"the memory of {asked}"),
    )


def find(wanted: str | int | None) -> Device:
    """The device called ``wanted``: an ordinal of this process, a UUID with or without ``GPU-`` or ``MIG-``, or the
    beginning of one (four digits or more). None: the only one there is.

    Raises DeviceAbsent where this process does not see it, InvalidOption where the word fits none or several.
    """
    found = devices()
    where = driver.visible_devices()
    fitting = [device for device in found if wanted is None or _fits(device, str(wanted))]
    if len(fitting) > 1:
        raise InvalidOption(
            "several devices fit",
            expected="one device" if wanted is None else wanted,
            found=_named(fitting),
            where=where,
            next_step="give the UUID of one",
        )
    if not fitting:
        raise DeviceAbsent(
            "this process does not see the device",
            expected=wanted,
            found=_named(found) or "no device",
            where=where,
            next_step="name a device that is seen, or let this process see it (CUDA_VISIBLE_DEVICES)",
        )
    return fitting[0]


def _named(found: Sequence[Device]) -> str:
    return "; ".join(f"{device.ordinal}: {device.uuid} ({device.name})" for device in found)


def why_no_descriptors(device: Device) -> str | None:
    """Why memory of ``device`` cannot be handed over as a descriptor; None where it can. Makes no context."""
    attributes = driver.bindings().CUdevice_attribute
    needed = {
        "virtual memory management": attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        "memory as POSIX descriptors": attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    }
    handle = driver.call("cuDeviceGet", device.ordinal, asked=f"device {device.ordinal}")
    for what, attribute in needed.items():
        if not driver.call("cuDeviceGetAttribute", attribute, handle, asked=f"whether {device.uuid} has {what}"):
            return f"{device.uuid} ({device.name}), or its driver, has no {what}"
    return None


def _fits(device: Device, wanted: str) -> bool:
    if wanted.isdecimal() and len(wanted) < 4:
        return device.ordinal == int(wanted)
    beginning = _PREFIX.fullmatch(wanted)
    if beginning is None:
        raise InvalidOption(
            "not a device", expected="an index, a UUID or four digits or more of its beginning", found=wanted
        )
    return device.uuid.startswith(beginning[1].lower())
