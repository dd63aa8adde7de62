"""Transforms: what happens to a slab's values between the checkpoint's dtype and the one that stays resident.

Owns the arithmetic of dtype conversion and of online quantization. Slab by slab: shard and fuse come before, and no
value depends on how a parameter was cut, since a channel (a row) is never cut. Torch is imported when the first
transform runs and not before: most loads need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcached.loader.planned import Cast, PlannedParameter, QuantizeFp8
from weightcached.loader.slabs import Slab
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0
"""The largest finite e4m3 value."""

FP8_SCALE_MIN = 1.0 / (FP8_MAX * 512.0)
"""Below it a channel is quantized as if its largest value were 2**-9: a channel of zeros has no scale of its own."""


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that go into the segment: to parameter ``name``, from byte ``offset`` of it."""

    name: str
    offset: int
    data: memoryview


def transformed(slab: Slab, source: memoryview) -> tuple[Output, ...]:
    """What the slab's ``source`` bytes become. Valid until ``source`` is written again.

    Raises CheckpointError naming the tensor when values that are not finite would be quantized.
    """
    parameter = slab.parameter
    if parameter.transform is None:
        return (Output(parameter.name, slab.first * itemsize_bytes(parameter.dtype), source),)
    values = _as_tensor(source, parameter.source_dtype or parameter.dtype)
    if isinstance(parameter.transform, Cast):
        data = _bytes_of(cast(values, parameter.transform.dtype))
        return (Output(parameter.name, slab.first * itemsize_bytes(parameter.dtype), data),)
    return _quantized(slab, values, parameter.transform)


def cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """``values`` in ``dtype``, to nearest even. What is too large becomes infinite, as it does in torch."""
    import torch

    target: torch.dtype = getattr(torch, dtype)
    return values.to(target)


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` [rows, columns] as e4m3 [rows, columns] and float32 scales [rows, 1], one for each row.

    ``scale = max(amax(|row|) / 448, 1 / (448 · 512))`` and ``q = e4m3(clamp(row / scale, ±448))``, divided in float32
    and rounded to nearest even: the arithmetic of vLLM's dynamic per-token and per-channel fp8 (which clamps the scale
    alike); compressed-tensors does the same and gives a row of zeros the scale ``eps`` instead. Every step is one
    IEEE operation per element or a maximum, so the result does not depend on threads, vector width or slabs.

    Error, for finite values: ``|q · scale − x| ≤ max(|x| · 2**-4, scale · 2**-10) · (1 + 2**-20)``: half a step of a
    three-bit mantissa, or half a step of the subnormals. Rows with a value that is not finite give a scale that is not.
    """
    import torch

    wide = values.to(torch.float32)
    # Not abs().amax(): one temporary less, and the others stay small enough for the allocator to keep their pages.
    largest = torch.maximum(wide.amax(dim=-1, keepdim=True), wide.amin(dim=-1, keepdim=True).neg_())
    scale = (largest / FP8_MAX).clamp_(min=FP8_SCALE_MIN)
    scaled = wide.div_(scale) if wide is not values else wide / scale
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def _quantized(slab: Slab, values: torch.Tensor, transform: QuantizeFp8) -> tuple[Output, ...]:
    import torch

    columns = slab.parameter.shape[-1]
    quantized, scale = quantize_rows(values.view(-1, columns))
    finite = torch.isfinite(scale)
    if not finite.all():
        row = slab.first // columns + int((~finite).flatten().nonzero()[0])
        raise CheckpointError(
            f"{_source_of_row(slab.parameter, row)} has a value that is not finite and cannot be quantized",
            expected="finite values",
            found="NaN or infinity",
            where=f"row {row} of {slab.parameter.name}",
            next_step="load it without --quantization, or repair the checkpoint",
        )
    return (
        Output(slab.parameter.name, slab.first, _bytes_of(quantized)),
        Output(transform.scale, slab.first // columns * 4, _bytes_of(scale)),
    )


def _source_of_row(parameter: PlannedParameter, row: int) -> str:
    """The checkpoint tensor that the parameter's row (counted over all axes but the last) comes from."""
    index = []
    for extent in reversed(parameter.shape[:-1]):
        row, place = divmod(row, extent)
        index.append(place)
    index.reverse()
    for copy in parameter.copies:
        box = copy.destination
        if all(a <= i < a + n for i, a, n in zip(index, box.start[:-1], box.shape[:-1], strict=True)):
            return f"tensor {copy.tensor.name!r} ({copy.tensor.file})"
    return f"parameter {parameter.name!r}"


def _as_tensor(data: memoryview, dtype: str) -> torch.Tensor:
    import torch

    return torch.frombuffer(data, dtype=getattr(torch, dtype))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
