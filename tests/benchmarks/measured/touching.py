"""First touch: what it costs an engine to look at every page of weights that it has attached to."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file

from weightcached.client import attach

_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def after_attach(arguments: dict[str, str], *, rounds: int) -> dict[str, Any]:
    """Each round attaches anew, so pages are unmapped again, and touches twice; then once more after populating."""
    seconds: dict[str, list[float]] = {way: [] for way in ("first", "second", "populate", "populated")}
    nbytes = 0
    for _ in range(rounds):
        with _attached(arguments) as weights:
            nbytes = weights.resident_bytes
            seconds["first"].append(_touch(weights))
            seconds["second"].append(_touch(weights))
        with _attached(arguments) as weights:
            seconds["populate"].append(_populate(weights))
            seconds["populated"].append(_touch(weights))
    return {"seconds": seconds, "nbytes": nbytes}


def mapped_file(files: list[str], *, rounds: int) -> dict[str, Any]:
    """The same of files that safetensors maps, all of them in the page cache."""
    seconds: dict[str, list[float]] = {"first": [], "second": []}
    for _ in range(rounds):
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        seconds["first"].append(_touch(tensors))
        seconds["second"].append(_touch(tensors))
        del tensors
    return {"seconds": seconds, "nbytes": sum(os.stat(file).st_size for file in files)}


def _attached(arguments: dict[str, str]) -> Any:
    return attach(arguments["model"], runtime_dir=arguments["runtime_dir"], name=arguments["name"], mode="require")


def _touch(tensors: Mapping[str, torch.Tensor]) -> float:
    """Read one byte of every page of every tensor, on one thread."""
    views = [tensor.flatten().view(torch.uint8) for tensor in tensors.values()]
    began_s = time.perf_counter()
    for view in views:
        view[:: os.sysconf("SC_PAGESIZE")].sum()
    return time.perf_counter() - began_s


def _populate(tensors: Mapping[str, torch.Tensor]) -> float:
    """Have the kernel map every page of the segment, in one call."""
    page = os.sysconf("SC_PAGESIZE")
    first = min(tensor.data_ptr() for tensor in tensors.values()) // page * page
    last = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors.values())
    began_s = time.perf_counter()
    if _libc.madvise(first, last - first, _MADV_POPULATE_READ) != 0:
        raise OSError(ctypes.get_errno(), f"MADV_POPULATE_READ: {os.strerror(ctypes.get_errno())}")
    return time.perf_counter() - began_s
