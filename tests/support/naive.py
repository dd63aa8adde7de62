"""The naive execution of a load plan, in numpy: the reference that the real executor is compared with.

It shares nothing with the loader but the plan's words, and the arithmetic of quantization (which has a reference of its
own): it slices arrays where the executor counts bytes, and quantizes whole matrices. Its results are the bytes' values
where numpy has them, else plain bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from weightcached.loader import arithmetic
from weightcached.loader.boxes import Box
from weightcached.loader.plan import Cast, LoadPlan, PlannedParameter, Quantize, TensorHeader
from weightcached.protocol.quantization import Quantization

_NUMPY = {
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    "bool": np.uint8,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "float8_e8m0fnu": np.uint8,
    "float8_e4m3fnuz": np.uint8,
    "float8_e5m2fnuz": np.uint8,
}


def numpy_dtype(name: str) -> np.dtype:
    """What holds elements of our dtype ``name``: numpy's own, or plain bits where numpy has none."""
    return np.dtype(_NUMPY.get(name, name))


def execute(plan: LoadPlan, source: Path | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameter name → array, from the checkpoint's directory or its tensors. An alias is its target's array."""
    made: dict[str, np.ndarray] = {}
    for parameter in plan.parameters:
        if parameter.alias_of is not None:
            made[parameter.name] = made[parameter.alias_of]
        elif isinstance(parameter.transform, Quantize):
            made |= _quantized(parameter.transform, _widened(_filled(parameter, source), parameter.source_dtype or ""))
        elif parameter.produced_by is None:
            made[parameter.name] = _parameter(parameter, source)
    return made


def short_digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Name → first 16 hex digits of SHA-256 over the C-order bytes, as the oracle lists them."""
    return {name: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:16] for name, a in arrays.items()}


def _parameter(parameter: PlannedParameter, source: Path | Mapping[str, np.ndarray]) -> np.ndarray:
    values = _filled(parameter, source)
    if isinstance(parameter.transform, Cast):
        return _cast(values, parameter.source_dtype or parameter.dtype, parameter.transform.dtype)
    return values


def _filled(parameter: PlannedParameter, source: Path | Mapping[str, np.ndarray]) -> np.ndarray:
    source_dtype = parameter.source_dtype or parameter.dtype
    values = np.full(parameter.source_shape, _poison(source_dtype), numpy_dtype(source_dtype))
    for copy in parameter.copies:
        taken = _tensor(copy.tensor, source)[slices(copy.source)]
        if copy.transposed:
            taken = taken.swapaxes(-1, -2)
        values[slices(copy.destination)] = taken.reshape(copy.destination.shape)
    for box in parameter.zeros:
        values[slices(box)] = 0
    return values


def _quantized(transform: Quantize, values: np.ndarray) -> dict[str, np.ndarray]:
    """Every product, from the whole weight in float32."""
    first = transform.products[0]
    into = torch.empty((math.prod(values.shape[:-2]), *first.shape[-2:]), dtype=getattr(torch, first.dtype))
    matrices = values.reshape(-1, *values.shape[-2:])
    shares = [_quantize(transform, torch.from_numpy(m.copy()), i) for m, i in zip(matrices, into, strict=True)]
    made = {}
    for number, product in enumerate(transform.products):
        stacked = torch.stack([share[number - 1] for share in shares]) if number else into
        bits = stacked.flatten().view(torch.uint8).numpy()
        made[product.name] = bits.view(numpy_dtype(product.dtype)).reshape(product.shape)
    return made


def _quantize(transform: Quantize, matrix: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, ...]:
    method, shape = transform.method, torch.tensor(matrix.shape)
    scale_dtype = getattr(torch, transform.products[1].dtype)
    match method:
        case Quantization(method="fp8", granularity="channel"):
            return arithmetic.fp8_channel(matrix, into)
        case Quantization(method="fp8", granularity="tensor"):
            return arithmetic.fp8_tensor(matrix, into, arithmetic.largest(matrix))
        case Quantization(method="fp8", granularity="block", block=(high, wide)):
            return arithmetic.fp8_block(matrix, into, (high, wide))
        case Quantization(method="int8"):
            return arithmetic.int8_channel(matrix, into)
        case Quantization(method="int4", group=int(group), symmetric=True):
            return (*arithmetic.int4_group(matrix, into, group, scale_dtype), shape)
        case Quantization(method="int4", group=int(group), symmetric=False):
            return (*arithmetic.int4_group_asymmetric(matrix, into, group, scale_dtype), shape)
    raise AssertionError(method)


def _poison(dtype: str) -> int:
    """A value that shows where nothing was written."""
    return 1 if numpy_dtype(dtype).itemsize == 1 else 77


def slices(box: Box) -> tuple[slice, ...]:
    """The box as a numpy index."""
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


def _tensor(header: TensorHeader, source: Path | Mapping[str, np.ndarray]) -> np.ndarray:
    if not isinstance(source, Path):
        return source[header.name]
    with open(source / header.file, "rb") as file:
        file.seek(header.offset)
        data = file.read(header.nbytes)
    return np.frombuffer(data, numpy_dtype(header.dtype)).reshape(header.shape)


def _cast(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """Convert, to nearest even. bfloat16 is bits: widened exactly, rounded by hand."""
    if source == "bfloat16":
        values = _widened(values, source)
    if target != "bfloat16":
        return values.astype(numpy_dtype(target))
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """In float32."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
