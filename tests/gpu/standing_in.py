"""Rows that need torch with CUDA, where there is none: ``python -m tests.gpu.standing_in SETTING ROW…``. Tensors of the
host stand in for a device's; the driver is the fake one, whose addresses are the host's.

What that shows: that the names which rows ask torch for exist, that they get arguments they can take, in an order that
makes sense, and that tensors of host and device are not mixed. Of CUDA, its streams, graphs and allocator it shows
nothing: here all of them are a few lines of Python. Nothing is rehearsed in this way but in ``test_standing_in.py``.
"""

from __future__ import annotations

import ctypes
import json
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.gpu import runner, serving
from tests.gpu.row import GIB, Setting, run_here
from weightcached.protocol.memory.cuda import devices, driver

DEVICE = torch.device("cuda", 0)
DONE_AFTER_S = 0.3
"""What a device was given is done so much later."""
_TO_HOST = ("cpu", "numpy", "item", "tolist", "__bool__", "__int__", "__float__")
_capturing: Graph | None = None


class Standing(TorchFunctionMode):
    """In a thread: what is made on a device is made on the host, and says that it is on the device."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        name = getattr(function, "__name__", "")
        if function is torch.device or name == "_parse_to":  # a word about devices, and no tensor
            return function(*arguments, **named)
        property_of = getattr(function, "__self__", None)
        if name == "__get__" and property_of in _PROPERTIES and _stands_in(arguments[0]):
            return _PROPERTIES[property_of]
        if name == "__set__":  # a module takes its parameters to a device by their data
            function(*arguments)
            return _mark(arguments[0]) if _stands_in(arguments[1]) else None
        if name == "as_tensor" and hasattr(arguments[0], "__cuda_array_interface__"):
            if not _is_device(named.get("device")):
                raise RuntimeError("an array of a device is taken without saying which: it might become a copy")
            return _mark(_over(arguments[0]))
        words = list(_flat((*arguments, *named.values())))
        tensors = [one for one in words if isinstance(one, torch.Tensor)]
        there = [one for one in tensors if _stands_in(one)]
        if (
            there
            and name not in (*_TO_HOST, "copy_", "to")
            and any(one.ndim and not _stands_in(one) for one in tensors)
        ):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        asked = any(_is_device(one) for one in words)
        to_host = name in _TO_HOST or (name == "to" and any(_is_host(one) for one in words))
        arguments = tuple(torch.device("cpu") if _is_device(one) else one for one in arguments)
        if _is_device(named.get("device")):
            named["device"] = torch.device("cpu")
        if there and to_host:
            _only_outside_a_capture(name)
        made = function(*arguments, **named)
        if to_host:
            made = made.clone() if any(made is one for one in there) else made  # from a device it is a copy
        elif there or asked:
            made = _mark(made)
        if _capturing is not None and there:
            _capturing.steps.append((function, arguments, named, made))
        return made


_PROPERTIES = {torch.Tensor.device: DEVICE, torch.Tensor.is_cuda: True}


def _is_device(one: object) -> bool:
    return (isinstance(one, torch.device) and one.type == "cuda") or (isinstance(one, str) and one.startswith("cuda"))


def _is_host(one: object) -> bool:
    return isinstance(one, str | torch.device) and str(one) == "cpu"


def _stands_in(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and "on_device" in one.__dict__


def _mark(made: Any) -> Any:
    for one in _flat((made,)):
        if isinstance(one, torch.Tensor):
            one.__dict__["on_device"] = True
    return made


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def _over(array: Any) -> torch.Tensor:
    shown = array.__cuda_array_interface__
    block = (ctypes.c_ubyte * shown["shape"][0]).from_address(shown["data"][0])
    block.owner = array  # ctypes arrays take attributes; this one holds the memory
    return torch.frombuffer(block, dtype=torch.uint8)


def _only_outside_a_capture(what: str) -> None:
    if _capturing is not None:
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


class Graph:
    """For ``CUDAGraph``: what was called while it was captured is called again, into the tensors of then."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        if not self.steps:
            raise RuntimeError("a graph is replayed that captured nothing")
        for function, arguments, named, made in self.steps:
            again = function(*arguments, **named)
            if isinstance(made, torch.Tensor) and again is not made:
                made.copy_(again)


@contextmanager
def _captured(graph: Graph) -> Iterator[None]:
    global _capturing
    _only_outside_a_capture("capturing")
    _capturing = graph
    try:
        yield
    finally:
        _capturing = None


class Event:
    """For ``torch.cuda.Event``. What was recorded is done after a while, so that there is something to wait for."""

    def __init__(self) -> None:
        self._recorded_s: float | None = None

    def record(self) -> None:
        self._recorded_s = time.monotonic()

    def query(self) -> bool:
        return self._recorded_s is None or time.monotonic() >= self._recorded_s + DONE_AFTER_S

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.001)


class ExternalStream:
    """For torch's: its work begins when the driver has done what it was given before."""

    def __init__(self, stream_ptr: int, device: torch.device) -> None:
        assert device == DEVICE
        self.cuda_stream = stream_ptr


@contextmanager
def _on_stream(stream: ExternalStream) -> Iterator[None]:
    driver.call("cuStreamSynchronize", stream.cuda_stream, asked="a stream's work before torch's")
    yield


def _statistics() -> dict[str, int]:
    """Zeros, by the names that torch's own documentation has for them."""
    names: list[str] = []
    for documented in re.findall(r'``"([\w.{},]+)"``', _DOCUMENTED or ""):
        parts = [re.fullmatch(r"\{(.*)\}", part) for part in documented.split(".")]
        expanded = [""]
        for part, several in zip(documented.split("."), parts, strict=True):
            choices = several[1].split(",") if several else [part]
            expanded = [f"{one}.{choice}".lstrip(".") for one in expanded for choice in choices]
        names += expanded
    return dict.fromkeys(names, 0)


_DOCUMENTED = torch.cuda.memory_stats.__doc__


def _synchronize(device: object = None) -> None:
    _only_outside_a_capture("synchronize")


def _spawned(get_context: Callable[[str], Any]) -> Callable[[str], Any]:
    """Whoever asks for a new process gets a forked one, in which all of this stands, too."""

    def context(method: str) -> Any:
        if method != "spawn":
            raise RuntimeError(f"a process made by {method} cannot use CUDA again: use spawn")
        return get_context("fork")

    return context


def install() -> None:
    """In this process, for good."""
    _put(torch.cuda, is_available=lambda: True, is_initialized=lambda: True, synchronize=_synchronize)
    _put(torch.cuda, device_count=lambda: len(devices.devices()), current_device=lambda: DEVICE.index)
    _put(torch.cuda, get_device_properties=lambda ordinal: SimpleNamespace(uuid=devices.devices()[ordinal].uuid))
    _put(torch.cuda, current_stream=lambda: SimpleNamespace(cuda_stream=0), ExternalStream=ExternalStream)
    _put(torch.cuda, stream=_on_stream, Event=Event, CUDAGraph=Graph, graph=_captured, memory_stats=_statistics)
    _put(torch.cuda, empty_cache=lambda: None, ipc_collect=lambda: None)
    _put(torch.cuda.memory, _snapshot=lambda: {"segments": [], "device_traces": [], "allocator_settings": {}})
    _put(torch.multiprocessing, get_context=_spawned(torch.multiprocessing.get_context))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a host's tensor is a descriptor where it is shared
    run = threading.Thread.run

    def run_standing(self: threading.Thread) -> None:
        with Standing():
            run(self)

    threading.Thread.run = run_standing  # type: ignore[method-assign]
    Standing().__enter__()


def _put(where: Any, **names: Any) -> None:
    """In the place of what is there: torch has to have the name."""
    for name, value in names.items():
        getattr(where, name)
        setattr(where, name, value)


def main(setting: Setting, *names: str) -> None:
    install()
    serving.SIZES = (GIB // 10,)  # names and arguments are those of any size
    for name in names:
        run_here(next(row for row in runner.ROWS if row.name == name), setting)


if __name__ == "__main__":
    main(Setting(**json.loads(sys.argv[1])), *sys.argv[2:])
