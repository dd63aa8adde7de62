"""Transforms: what becomes of a slab's values between the checkpoint's dtype and what stays resident.

Owns where the results go and which values cannot be quantized; the arithmetic is `arithmetic.py`. Slab by slab: shard
and fuse come before, and no value depends on how a parameter was cut, since what shares a scale is never parted. Torch
is imported when the first transform runs and not before: most loads need none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from weightcached.loader import arithmetic
from weightcached.loader.bench import Bench, over
from weightcached.loader.destination import Output
from weightcached.loader.planned import Cast, PlannedParameter, Quantize
from weightcached.loader.slabs import Slab
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import UnusableValue

if TYPE_CHECKING:
    import torch


class Transforms:
    """One thread's transforms, at its bench."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

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
        first = self._bench.result(parameter.name, slab.first // each * itemsize, slab.elements // each * itemsize)
        data = self._bench.source(source)
        with self._bench.working():
            others = self._transformed(slab, data, _as(first.tensor, parameter.dtype), largest)
        return (first.output(), *others)

    def _transformed(self, slab: Slab, data: torch.Tensor, into: torch.Tensor, largest: float) -> tuple[Output, ...]:
        """Fills ``into``; returns what else is made."""
        parameter = slab.parameter
        if not isinstance(parameter.transform, Quantize):
            into.copy_(_as(data, parameter.source_dtype or parameter.dtype))
            if isinstance(parameter.transform, Cast) and parameter.transform.finite and not into.isfinite().all():
                _refuse_scale(slab, into)
            return ()
        values = _rows(slab, data)
        wide = self._bench.floats(values.numel()).view(values.shape).copy_(values)
        made = _quantized(parameter.transform, values, wide, into.view(values.shape[0], -1), largest)
        if not math.isfinite(made[0].max()):
            _refuse(slab, values)
        return tuple(_placed(slab, parameter.transform, made))


def measure(slab: Slab, source: memoryview) -> float:
    """The largest value of the slab, by magnitude. Raises UnusableValue naming the tensor when it is not finite."""
    values = _rows(slab, over(source))
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


def _rows(slab: Slab, data: torch.Tensor) -> torch.Tensor:
    """The slab's bytes as rows ``[rows, in]``."""
    parameter = slab.parameter
    return _as(data, parameter.source_dtype or parameter.dtype).view(-1, parameter.source_shape[-1])


def _as(data: torch.Tensor, dtype: str) -> torch.Tensor:
    import torch

    return data.view(getattr(torch, dtype))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data
