"""Online quantization of whole matrices, step by step as vLLM's and compressed-tensors' formulas have it.

The loader computes the same in pieces and in place; here each formula stands as it is written, in float32.
"""

from __future__ import annotations

import torch

from weightcached.loader.reference.ranks import NotCompared
from weightcached.protocol.quantization import Quantization

_E4M3_MAX = 448.0


def endings(method: Quantization) -> tuple[str, ...]:
    """What the names of the parameters that stand for a weight have after the weight's."""
    match method:
        case Quantization(method="none"):
            return ()
        case Quantization(method="int4", symmetric=symmetric):
            return ("_packed", "_scale", "_shape") if symmetric else ("_packed", "_scale", "_zero_point", "_shape")
        case Quantization(granularity="block"):
            return "", "_scale_inv"
    return "", "_scale"


def quantized(weight: torch.Tensor, method: Quantization, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What stands for a weight ``[out, in]``, or for a stack of them: ending of the parameter's name → tensor.

    ``dtype``: the weight's own, if it were not quantized.
    """
    if weight.dim() == 2:
        return _matrix(weight.float(), method, dtype)
    each = [_matrix(matrix.float(), method, dtype) for matrix in weight]
    stacks = {ending: torch.stack([made[ending] for made in each]) for ending in each[0]}
    return {name: made.flatten() if method.granularity == "tensor" and name else made for name, made in stacks.items()}


def _matrix(x: torch.Tensor, method: Quantization, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    match method:
        case Quantization(method="fp8", granularity="channel"):
            scale = (x.abs().amax(dim=1, keepdim=True) / _E4M3_MAX).clamp(min=1 / (_E4M3_MAX * 512))
            return {"": _e4m3(x / scale), "_scale": scale}
        case Quantization(method="fp8", granularity="tensor"):
            scale = (x.abs().amax().reshape(1) / _E4M3_MAX).clamp(min=1 / (_E4M3_MAX * 512))
            return {"": _e4m3(x * scale.reciprocal()), "_scale": scale}
        case Quantization(method="fp8", block=(high, wide)):
            outputs, inputs = x.shape
            padded = torch.nn.functional.pad(x, (0, -inputs % wide, 0, -outputs % high))
            blocks = padded.view(len(padded) // high, high, -1, wide)
            scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-4) / _E4M3_MAX
            values = blocks * scale.reciprocal()[:, None, :, None]
            return {"": _e4m3(values.flatten(2).flatten(0, 1)[:outputs, :inputs]), "_scale_inv": scale}
        case Quantization(method="int8", granularity="channel"):
            scale = _never_zero(x.abs().amax(dim=1, keepdim=True) / 127.5)
            return {"": (x / scale).clamp(-128, 127).round().to(torch.int8), "_scale": scale}
        case Quantization(method="int4", group=int(group), symmetric=symmetric):
            scale_dtype = torch.float32 if dtype == torch.float64 else dtype
            return _int4(x, group, scale_dtype, has_zeros=not symmetric)
    raise NotCompared(f"no rule for quantization {method.spelled}")


def _int4(x: torch.Tensor, group: int, dtype: torch.dtype, *, has_zeros: bool) -> dict[str, torch.Tensor]:
    groups = x.reshape(len(x), -1, group)
    if has_zeros:
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        exact = (high - low) / 15
        zero = torch.where(exact == 0, 0.0, (-8 - low / exact).clamp(-8, 7).round())
    else:
        exact = groups.abs().amax(dim=2) / 7.5
        zero = torch.zeros_like(exact)
    scale = _never_zero(exact.to(dtype))
    values = (groups / scale.float().unsqueeze(2) + zero.unsqueeze(2)).clamp(-8, 7).round().flatten(1)
    made = {"_packed": _packed(values + 8), "_scale": scale}
    if has_zeros:
        missing = torch.zeros(-len(zero) % 8, zero.shape[1])
        made["_zero_point"] = _packed(torch.cat([zero + 8, missing]).t()).t()
    return {**made, "_shape": torch.tensor(x.shape)}


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _never_zero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 to 15, eight neighbours to an integer, the first in its lowest bits."""
    integers = (values.long().reshape(len(values), -1, 8) << torch.arange(0, 32, 4)).sum(dim=2)
    return torch.where(integers >= 1 << 31, integers - (1 << 32), integers).to(torch.int32)
