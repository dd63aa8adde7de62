"""Transforms: what becomes of a slab's values between the checkpoint's dtype and what stays resident.

Owns where the results go and which values cannot be quantized; the arithmetic is `arithmetic.py`. Slab by slab: shard
and fuse come before, and no value depends on how a parameter was cut, since what shares a scale is never parted. Torch
is imported when the first transform runs and not before: most loads need none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from weightcached.loader import arithmetic
from weightcached.loader.destination import Room
from weightcached.loader.planned import Cast, PlannedParameter, Quantize
from weightcached.loader.slabs import Slab
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import UnusableValue

if TYPE_CHECKING:
    import torch


Lend = Callable[[str, int, int], Room | None]
"""Gives room for (parameter, offset, nbytes), where the destination has some to lend."""


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that go into the segment: to parameter ``name``, from byte ``offset`` of it."""

    name: str
    offset: int
    data: memoryview
    room: Room | None = None
    """The destination's, that they lie in; None where they are to be written."""


class Transforms:
    """One thread's transforms. Its memory is used again, since fresh pages cost more than what is computed in them."""

    def __init__(self, lend: Lend) -> None:
        self._lend = lend
        self._floats: torch.Tensor | None = None
        self._bytes = bytearray()

    def outputs(self, slab: Slab, source: memoryview, *, largest: float = 0.0) -> tuple[Output, ...]:
        """What the slab's ``source`` bytes become; the parameter itself first. Of what is in no room, the first is
        valid until ``source`` is written again or this is called again.

        ``largest``: of its matrix, where that has been measured. Raises UnusableValue naming the tensor when values
        cannot be quantized.
        """
        parameter = slab.parameter
        itemsize = itemsize_bytes(parameter.dtype)
        if parameter.transform is None:
            return (Output(parameter.name, slab.first * itemsize, source),)
        # As many elements of the parameter as of what it is made of, or fewer, packed.
        each = math.prod(parameter.source_shape) // math.prod(parameter.shape)
        first = self._first(parameter.name, slab.first // each * itemsize, slab.elements // each * itemsize)
        into = _as_tensor(first.data, parameter.dtype)
        if isinstance(parameter.transform, Cast):
            into.copy_(_as_tensor(source, parameter.source_dtype or parameter.dtype))
            if parameter.transform.finite and not into.isfinite().all():
                _refuse_scale(slab, into)
            return (first,)
        values = _values(slab, source)
        made = _quantized(parameter.transform, values, self._wide(values), into.view(values.shape[0], -1), largest)
        if not math.isfinite(made[0].max()):
            _refuse(slab, values)
        return (first, *_placed(slab, parameter.transform, made))

    def _first(self, name: str, offset: int, nbytes: int) -> Output:
        """The output for the parameter itself, to be filled."""
        if (room := self._lend(name, offset, nbytes)) is not None:
            return Output(name, offset, room.memory, room)
        if len(self._bytes) < nbytes:
            self._bytes = bytearray(nbytes)
        return Output(name, offset, memoryview(self._bytes)[:nbytes])

    def _wide(self, values: torch.Tensor) -> torch.Tensor:
        import torch

        if self._floats is None or self._floats.numel() < values.numel():
            self._floats = torch.empty(values.numel(), dtype=torch.float32)
        return self._floats[: values.numel()].view(values.shape).copy_(values)


def measure(slab: Slab, source: memoryview) -> float:
    """The largest value of the slab, by magnitude. Raises UnusableValue naming the tensor when it is not finite."""
    values = _values(slab, source)
    largest = arithmetic.largest(values)
    if not math.isfinite(largest):
        _refuse(slab, values)
    return largest


def _quantized(
    transform: Quantize, origin: torch.Tensor, x: torch.Tensor, into: torch.Tensor, largest: float
) -> tuple[torch.Tensor, ...]:
    """Fills ``into``; returns the share that rows ``x`` of one matrix have of each other product, the scales first."""
    import torch

    method = transform.method
    match method.granularity:
        case "tensor":
            return arithmetic.fp8_tensor(x, into, largest)
        case "block" if method.block is not None:
            return arithmetic.fp8_block(x, into, method.block)
        case "group" if method.group is not None:
            dtype: torch.dtype = getattr(torch, transform.products[1].dtype)
            quantize = arithmetic.int4_group if method.symmetric else arithmetic.int4_group_asymmetric
            return (*quantize(x, into, method.group, dtype), torch.tensor(transform.shape[-2:]))
    by_channel = arithmetic.fp8_channel if method.method == "fp8" else arithmetic.int8_channel
    return by_channel(x, into, origin)


def _placed(slab: Slab, transform: Quantize, made: tuple[torch.Tensor, ...]) -> Iterator[Output]:
    """Where in its parameter each share belongs. One that is all of its matrix's comes with the first rows."""
    rows, columns = transform.shape[-2:]
    row = slab.first // columns
    matrix, row = divmod(row, rows)
    matrices = math.prod(transform.shape[:-2])
    for product, tensor in zip(transform.products[1:], made, strict=True):
        if product.rows is None and row:
            continue
        share = math.prod(product.shape) // matrices
        before = 0 if product.rows is None else row // product.rows * product.shape[-1]
        yield Output(product.name, (matrix * share + before) * tensor.itemsize, _bytes_of(tensor))


def _refuse(slab: Slab, values: torch.Tensor) -> NoReturn:
    """Say which value cannot be quantized."""
    bad = values.isfinite().logical_not_()
    what, found = "a value that is not finite", "NaN or infinity"
    if not bad.any():
        bad = values.abs() == values.abs().max()
        what, found = "values too large for the scales that they would have", f"{float(values[bad][0])!r}"
    element = slab.first + int(bad.flatten().nonzero()[0])
    raise UnusableValue(
        f"{_source_of(slab.parameter, element)} has {what} and cannot be quantized",
        expected="finite values",
        found=found,
        where=f"row {element // values.shape[-1]} of {slab.parameter.name}",
        next_step="load it without --quantization, or repair the checkpoint",
    )


def _refuse_scale(slab: Slab, values: torch.Tensor) -> NoReturn:
    """Say which scale is none."""
    at = int(values.isfinite().logical_not_().nonzero()[0])
    raise UnusableValue(
        f"{_source_of(slab.parameter, slab.first + at)} is a scale and has a value that is not finite",
        expected="finite values",
        found=f"{float(values[at])!r} as {slab.parameter.dtype}",
        where=f"element {slab.first + at} of {slab.parameter.name}",
        next_step="repair the checkpoint, or quantize it again",
    )


def _source_of(parameter: PlannedParameter, element: int) -> str:
    """The checkpoint tensor that an element comes from."""
    index = []
    for extent in reversed(parameter.source_shape):
        element, place = divmod(element, extent)
        index.append(place)
    index.reverse()
    for copy in parameter.copies:
        box = copy.destination
        if all(a <= i < a + n for i, a, n in zip(index, box.start, box.shape, strict=True)):
            return f"tensor {copy.tensor.name!r} ({copy.tensor.file})"
    return f"parameter {parameter.name!r}"


def _values(slab: Slab, source: memoryview) -> torch.Tensor:
    """The slab as rows ``[rows, in]``."""
    parameter = slab.parameter
    values = _as_tensor(source, parameter.source_dtype or parameter.dtype)
    return values.view(-1, parameter.source_shape[-1])


def _as_tensor(data: memoryview, dtype: str) -> torch.Tensor:
    import torch

    return torch.frombuffer(data, dtype=getattr(torch, dtype))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
