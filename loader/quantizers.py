"""Quantizers: which parameters each online method makes of a linear layer's weight, and which weights it refuses.

Pure; what is in them is `arithmetic.py`. Names, shapes and packing are those that vLLM registers and compressed-tensors
stores. For a weight ``N`` of shape ``[out, in]``, this rank's, fused:

| method | parameters |
| --- | --- |
| ``fp8-tensor`` | ``N`` float8_e4m3fn, ``N_scale`` float32 ``[1]`` |
| ``fp8`` | ``N`` float8_e4m3fn, ``N_scale`` float32 ``[out, 1]`` |
| ``fp8-block`` | ``N`` float8_e4m3fn, ``N_scale_inv`` float32 ``[⌈out/block⌉, ⌈in/block⌉]`` |
| ``int8`` | ``N`` int8, ``N_scale`` float32 ``[out, 1]`` |
| ``int4`` | ``N_packed`` int32 ``[out, in/8]``, ``N_scale`` ``[out, in/group]``, ``N_shape`` int64 ``[2]`` |
| ``int4-asym`` | the same, and ``N_zero_point`` int32 ``[⌈out/8⌉, in/group]`` before ``N_shape`` |

Experts, a stack ``[E, out, in]``, have each of these once an expert: ``[E, …]`` (``[E]`` for the scale of a tensor).
Blocks are counted from the shard's first row and column, so the last of each may be smaller. Groups are whole, or the
weight is refused. Scales of int4 have the dtype that the weight itself would have, or float32 for float64.
"""

from __future__ import annotations

import math

from weightcached.loader.boxes import Shape
from weightcached.loader.planned import Product, Quantize
from weightcached.protocol.errors import UnsupportedModel
from weightcached.protocol.quantization import Quantization

PACKED = 8
"""Four-bit values in an int32, the first in its lowest bits."""


def quantizer(name: str, shape: Shape, method: Quantization, *, dtype: str) -> Quantize:
    """How ``method`` quantizes the weight ``name``, which would be of ``dtype`` without. Raises UnsupportedModel."""
    if not math.prod(shape):
        raise UnsupportedModel(f"{name} has no elements that could be quantized", found=list(shape))
    stack, (outputs, inputs) = shape[:-2], shape[-2:]
    scales = Product(f"{name}_scale", (*stack, outputs, 1), "float32")
    products: tuple[Product, ...]
    match method.method, method.granularity:
        case "fp8", "tensor":
            scales = Product(f"{name}_scale", stack or (1,), "float32", rows=None)
            products = (Product(name, shape, "float8_e4m3fn"), scales)
        case "fp8", "channel":
            products = (Product(name, shape, "float8_e4m3fn"), scales)
        case "fp8", "block" if method.block is not None:
            high, wide = method.block
            blocks = (*stack, -(-outputs // high), -(-inputs // wide))
            products = (
                Product(name, shape, "float8_e4m3fn"),
                Product(f"{name}_scale_inv", blocks, "float32", rows=high),
            )
        case "int8", "channel":
            products = (Product(name, shape, "int8"), scales)
        case "int4", "group" if method.group is not None:
            products = _int4(name, shape, method, method.group, dtype)
        case _:
            raise UnsupportedModel("this release has no such quantization", found=method.model_dump())
    return Quantize(method, shape, products)


def _int4(name: str, shape: Shape, method: Quantization, group: int, dtype: str) -> tuple[Product, ...]:
    stack, (outputs, inputs) = shape[:-2], shape[-2:]
    if inputs % group:
        raise UnsupportedModel(
            f"{name} cannot be quantized in groups of {group}: they would not be whole",
            expected=f"a multiple of {group} inputs on each rank",
            found=f"{inputs} inputs of this rank's {list(shape)}",
            next_step=f"choose a group that divides it, as in int4={math.gcd(inputs, group)}"
            if math.gcd(inputs, group) % PACKED == 0
            else "use fewer TP ranks, or another quantization",
        )
    zeros = Product(f"{name}_zero_point", (*stack, -(-outputs // PACKED), inputs // group), "int32", rows=PACKED)
    return (
        Product(f"{name}_packed", (*stack, outputs, inputs // PACKED), "int32"),
        Product(f"{name}_scale", (*stack, outputs, inputs // group), "float32" if dtype == "float64" else dtype),
        *(() if method.symmetric else (zeros,)),
        Product(f"{name}_shape", (*stack, 2), "int64", rows=None),
    )
