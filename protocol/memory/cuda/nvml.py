"""How much of a device's memory is in use, and by whom: NVIDIA's management library, asked without a context.

Owns loading ``libnvidia-ml.so.1`` and the few calls needed. By ctypes, because the bindings' own module for it imports
numpy, and the keeper has none. What NVML cannot say (a container's other processes, memory that only a descriptor
holds) is said to be unknown.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

from weightcached.protocol.errors import DeviceAbsent, DeviceFailed, InsufficientMemory, WeightCacheError
from weightcached.protocol.text import one_line

_SUCCESS = 0
_UNKNOWN_NBYTES = 2**64 - 1
_PROCESSES_MAX = 1024
_UUID_MAX_CHARACTERS = 96


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    """``nvmlProcessInfo_t`` of the call's third version."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Memory:
    """Bytes of a device. ``used`` includes what the driver keeps for itself."""

    total_nbytes: int
    free_nbytes: int
    used_nbytes: int


@dataclass(frozen=True)
class Holder:
    """A process with a context on the device. ``nbytes`` is None where the driver does not tell."""

    pid: int
    nbytes: int | None


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise DeviceAbsent(
            "cannot ask for a device's memory",
            expected="libnvidia-ml.so.1",
            found=str(error),
            next_step="install NVIDIA's driver; in a container, give it the capability `utility`",
        ) from error
    library.nvmlErrorString.restype = ctypes.c_char_p
    return library


@functools.cache
def initialise() -> None:
    """Once in a process; everything else does it. Takes no memory of a device."""
    _checked("nvmlInit_v2", asked="NVML")


def _checked(name: str, *arguments: object, asked: str) -> None:
    library = _library()
    result = getattr(library, name)(*arguments)
    if result != _SUCCESS:
        said = (library.nvmlErrorString(result) or b"").decode(errors="replace") or f"nvmlReturn {result}"
        raise DeviceFailed(f"{name} failed", expected=asked, found=said, next_step="try `nvidia-smi`: it asks the same")


def _handle(uuid: str) -> ctypes.c_void_p:
    """``uuid`` as :class:`~weightcached.protocol.memory.cuda.devices.Device` has it; NVML wants to be told the kind."""
    initialise()
    handle = ctypes.c_void_p()
    call, asked = "nvmlDeviceGetHandleByUUID", f"device {uuid}"
    try:
        _checked(call, f"GPU-{uuid}".encode(), ctypes.byref(handle), asked=asked)
    except DeviceFailed:
        _checked(call, f"MIG-{uuid}".encode(), ctypes.byref(handle), asked=asked)
    return handle


def uuids() -> tuple[str, ...]:
    """Every GPU of the host that NVML shows this process, whatever ``CUDA_VISIBLE_DEVICES`` says; of a GPU that is cut
    into MIG instances the whole. Raises DeviceAbsent without NVML, DeviceFailed where it does not answer.
    """
    initialise()
    count = ctypes.c_uint()
    _checked("nvmlDeviceGetCount_v2", ctypes.byref(count), asked="the number of devices")
    found = []
    for index in range(count.value):
        handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_MAX_CHARACTERS)
        asked = f"device {index}"
        _checked("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle), asked=asked)
        _checked("nvmlDeviceGetUUID", handle, text, ctypes.c_uint(len(text)), asked=f"the UUID of {asked}")
        found.append(text.value.decode("ascii", "replace").removeprefix("GPU-").lower())
    return tuple(found)


def memory(uuid: str) -> Memory:
    """Of the device now. Raises DeviceAbsent without NVML, DeviceFailed where it does not answer."""
    handle, found = _handle(uuid), _Memory()
    _checked("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(found), asked=f"the memory of {uuid}")
    return Memory(total_nbytes=found.total, free_nbytes=found.free, used_nbytes=found.used)


def holders(uuid: str) -> tuple[Holder, ...]:
    """Who has a context on the device, most memory first. Errors as for :func:`memory`."""
    handle = _handle(uuid)
    count = ctypes.c_uint(_PROCESSES_MAX)
    found = (_Process * _PROCESSES_MAX)()
    call = "nvmlDeviceGetComputeRunningProcesses_v3"
    _checked(call, handle, ctypes.byref(count), found, asked=f"the processes on {uuid}")
    listed = (
        Holder(entry.pid, None if entry.used == _UNKNOWN_NBYTES else entry.used) for entry in found[: count.value]
    )
    return tuple(sorted(listed, key=lambda holder: -(holder.nbytes or 0)))


def memory_in_words(uuid: str) -> str:
    """For a message: how much is free, and who holds the rest. Says so where NVML does not know; raises nothing."""
    try:
        now = memory(uuid)
        names = [holder_in_words(holder) for holder in holders(uuid)]
    except WeightCacheError as error:
        return f"who holds its memory is unknown ({error})"
    known = ", ".join(names) or "no process that NVML names"
    return f"{now.free_nbytes >> 20} of {now.total_nbytes >> 20} MiB free; held by {known}"


def no_room(error: InsufficientMemory, *, asked: str, uuid: str) -> InsufficientMemory:
    """What a full device is reported as: the driver's ``error``, and who holds the memory."""
    return InsufficientMemory(
        "the device has no room",
        expected=asked,
        found=f"{error.found}; {memory_in_words(uuid)}",
        where=f"device {uuid}",
        next_step="stop what holds it, cache a smaller shard (more ranks), or choose another device",
    )


def holder_in_words(holder: Holder) -> str:
    """``pid 812 (python: 300 MiB)``."""
    share = "unknown" if holder.nbytes is None else f"{holder.nbytes >> 20} MiB"
    try:
        command = one_line(Path(f"/proc/{holder.pid}/comm").read_text().strip())
    except OSError:
        command = "not of this container"
    return f"pid {holder.pid} ({command}: {share})"
