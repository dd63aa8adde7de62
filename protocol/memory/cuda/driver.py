"""One checked call of CUDA's driver: every result is looked at, every failure becomes an error of the project's tree.

Owns importing ``cuda-bindings`` (late), initialising the driver, and what a failure is called and what helps against
it. Does not know what any call is for: that says whoever calls, in ``asked``.

Initialising makes no context and takes no memory of a device. But a process that forks afterwards has a child that can
use no device: call nothing here before all forks that do not exec are done.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from weightcached.protocol.errors import DeviceAbsent, DeviceFailed, InsufficientMemory, WeightCacheError

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_ABSENT = {
    "CUDA_ERROR_NO_DEVICE": "check that the process is given a device (CUDA_VISIBLE_DEVICES, the container's devices)",
    "CUDA_ERROR_INVALID_DEVICE": "ask for a device that this process sees: `nvidia-smi -L` lists all there are",
    "CUDA_ERROR_STUB_LIBRARY": "let the driver's own libcuda.so.1 be found before the toolkit's stub",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "make the kernel's driver and libcuda.so.1 the same version",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the device to itself: check its compute mode",
    "CUDA_ERROR_MPS_CONNECTION_FAILED": "start the MPS control daemon, or unset CUDA_MPS_PIPE_DIRECTORY",
}
"""Failures that say the device or its driver is not there for us, and what helps."""
_NEXT_STEPS = {
    "CUDA_ERROR_NOT_SUPPORTED": "choose another memory kind (--memory): this device or driver cannot do this one",
    "CUDA_ERROR_NOT_PERMITTED": "check the container's permissions and the driver's (`dmesg | grep NVRM`)",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "end this process: its context is lost. Memory of other processes is untouched",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "reset or replace the device: `nvidia-smi -q -d ECC` tells what broke",
    "CUDA_ERROR_UNKNOWN": "look for the device in `nvidia-smi` and for its faults in `dmesg | grep NVRM`",
}


@functools.cache
def bindings() -> Any:
    """The module ``cuda.bindings.driver``, for its types and constants; calls go through :func:`call`.

    Raises DeviceAbsent where the package is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceAbsent(
            "CUDA memory needs the package cuda-bindings",
            found=str(error),
            next_step="pip install 'weightcached[cuda]'",
        ) from error


def call(name: str, *arguments: object, asked: str) -> Any:
    """The driver's ``name`` with ``arguments``: what it gives besides its result, alone or as a tuple, or None.

    ``asked`` says in words what was asked for, for the message. Raises InsufficientMemory where the device (or the
    host, for pinned memory) is full, DeviceAbsent where device or driver is not there, DeviceFailed for the rest.
    """
    result, *values = _called(name, *arguments, asked=asked)
    if result != 0:
        raise failure(name, result, asked=asked)
    return values[0] if len(values) == 1 else tuple(values) or None


def finished(name: str, *arguments: object, asked: str) -> bool:
    """Like :func:`call` for a call that asks whether work is done: False while it is not."""
    (result,) = _called(name, *arguments, asked=asked)
    if result == bindings().CUresult.CUDA_ERROR_NOT_READY:
        return False
    if result != 0:
        raise failure(name, result, asked=asked)
    return True


def _called(name: str, *arguments: object, asked: str) -> tuple[Any, ...]:
    function = getattr(bindings(), name)
    try:
        results: tuple[Any, ...] = function(*arguments)
    except RuntimeError as error:  # the bindings' own: no libcuda.so.1, or none that has this call
        raise DeviceAbsent(
            f"the CUDA driver has no {name}",
            expected="NVIDIA's driver, new enough to have it",
            found=str(error),
            next_step="install NVIDIA's driver, or a newer one; in a container, run it with the GPU (--gpus)",
        ) from error
    except ValueError as error:  # a result that the bindings have no word for
        raise DeviceFailed(
            f"{name} failed",
            expected=asked,
            found=str(error),
            next_step="install a cuda-bindings as new as the driver",
        ) from error
    return results


def failure(name: str, result: Any, *, asked: str) -> WeightCacheError:
    """The error for a call's ``result`` that is not success."""
    said = str(result.name)
    if said == _OUT_OF_MEMORY:
        return InsufficientMemory(f"{name} found no memory", expected=asked, found=said)
    if said in _ABSENT:
        return DeviceAbsent(
            f"{name} found no device", expected=asked, found=said, where=visible_devices(), next_step=_ABSENT[said]
        )
    return DeviceFailed(f"{name} failed", expected=asked, found=said, next_step=_NEXT_STEPS.get(said))


def visible_devices() -> str:
    """What the driver was told to show to this process, for messages."""
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}"


@functools.cache
def initialise() -> None:
    """Have the driver look for devices, once in a process. Makes no context. Everything else needs it."""
    call("cuInit", 0, asked="the CUDA driver")
