"""Transforms: what becomes of a slab's values between the checkpoint's dtype and what stays resident.

Owns where the results go and which values cannot be quantized; the arithmetic is `arithmetic.py`. Slab by slab: shard
and fuse come before, and no value depends on how a parameter was cut, since what shares a scale is never parted. Torch
is imported when the first transform runs and not before: most loads need none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from weightcached.loader import arithmetic
from weightcached.loader.planned import Cast, PlannedParameter, Quantize
from weightcached.loader.slabs import Slab
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import UnusableValue

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that go into the segment: to parameter ``name``, from byte ``offset`` of it."""

    name: str
    offset: int
    data: memoryview


class Transforms:
    """One thread's transforms. Its memory is used again, since fresh pages cost more than what is computed in them."""

    def __init__(self) -> None:
        self._floats: torch.Tensor | None = None

    def outputs(self, slab: Slab, source: memoryview, *, largest: float = 0.0) -> tuple[Output, ...]:
        """What the slab's ``source`` bytes become; the parameter itself first. Valid until ``source`` is written again.

        ``largest``: of its matrix, where that has been measured. Raises UnusableValue naming the tensor when values
        cannot be quantized.
        """
        parameter = slab.parameter
        if isinstance(parameter.transform, Quantize):
            values = _values(slab, source)
            made = _quantized(parameter.transform, self._wide(values), largest)
            if not made[1].isfinite().all():
                _refuse(slab, values)
            return tuple(_placed(slab, parameter.transform, made))
        if isinstance(parameter.transform, Cast):
            values = _as_tensor(source, parameter.source_dtype or parameter.dtype)
            source = _bytes_of(cast(values, parameter.transform.dtype))
        return (Output(parameter.name, slab.first * itemsize_bytes(parameter.dtype), source),)

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


def cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """``values`` in ``dtype``, to nearest even. What is too large becomes infinite, as it does in torch."""
    import torch

    target: torch.dtype = getattr(torch, dtype)
    return values.to(target)


def _quantized(transform: Quantize, x: torch.Tensor, largest: float) -> tuple[torch.Tensor, ...]:
    """The share that rows ``x`` of one matrix have of each product, in their order; the scales are second."""
    import torch

    method = transform.method
    match method.granularity:
        case "tensor":
            return arithmetic.fp8_tensor(x, largest)
        case "block" if method.block is not None:
            return arithmetic.fp8_block(x, method.block)
        case "group" if method.group is not None:
            dtype: torch.dtype = getattr(torch, transform.products[1].dtype)
            pack = arithmetic.int4_group if method.symmetric else arithmetic.int4_group_asymmetric
            return (*pack(x, method.group, dtype), torch.tensor(transform.shape[-2:]))
    return arithmetic.fp8_channel(x) if method.method == "fp8" else arithmetic.int8_channel(x)


def _placed(slab: Slab, transform: Quantize, made: tuple[torch.Tensor, ...]) -> Iterator[Output]:
    """Where in its parameter each share belongs. One that is all of its matrix's comes with the first rows."""
    rows, columns = transform.shape[-2:]
    row = slab.first // columns
    matrix, row = divmod(row, rows)
    matrices = math.prod(transform.shape[:-2])
    for product, tensor in zip(transform.products, made, strict=True):
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
    row, column = (int(index) for index in bad.nonzero()[0])
    row += slab.first // values.shape[-1]
    raise UnusableValue(
        f"{_source_of(slab.parameter, row, column)} has {what} and cannot be quantized",
        expected="finite values",
        found=found,
        where=f"row {row} of {slab.parameter.name}",
        next_step="load it without --quantization, or repair the checkpoint",
    )


def _source_of(parameter: PlannedParameter, row: int, column: int) -> str:
    """The checkpoint tensor that an element (its row counted over all axes but the last) comes from."""
    index = [column]
    for extent in reversed(parameter.source_shape[:-1]):
        row, place = divmod(row, extent)
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
