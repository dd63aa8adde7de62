"""The naive execution of a load plan, in numpy: the reference that the real executor is compared with.

It shares nothing with the loader but the plan's words: it slices arrays where the executor counts bytes. Copies,
padding, casts and aliases; a quantized weight and its scale are left out (quantization has a reference of its own).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from weightcached.loader.boxes import Box
from weightcached.loader.plan import Cast, LoadPlan, PlannedParameter, QuantizeFp8, TensorHeader

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
        elif parameter.produced_by is None and not isinstance(parameter.transform, QuantizeFp8):
            made[parameter.name] = _parameter(parameter, source)
    return made


def short_digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Name → first 16 hex digits of SHA-256 over the C-order bytes, as the oracle lists them."""
    return {name: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:16] for name, a in arrays.items()}


def _parameter(parameter: PlannedParameter, source: Path | Mapping[str, np.ndarray]) -> np.ndarray:
    source_dtype = parameter.source_dtype or parameter.dtype
    values = np.full(parameter.shape, _poison(source_dtype), numpy_dtype(source_dtype))
    for copy in parameter.copies:
        taken = _tensor(copy.tensor, source)[slices(copy.source)]
        if copy.transposed:
            taken = taken.swapaxes(-1, -2)
        values[slices(copy.destination)] = taken.reshape(copy.destination.shape)
    for box in parameter.zeros:
        values[slices(box)] = 0
    if isinstance(parameter.transform, Cast):
        return _cast(values, source_dtype, parameter.transform.dtype)
    return values


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
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if target != "bfloat16":
        return values.astype(numpy_dtype(target))
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
