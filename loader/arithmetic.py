"""The arithmetic of online quantization: matrices of float32 in, integers or e4m3 and their scales out.

Owns every formula and its error bound; knows nothing of plans, files or names. fp8 is computed as vLLM does, integers
as compressed-tensors does in float32; tests compare the bytes with both. Each step is one IEEE operation per element or
a maximum, so no result depends on threads, vector width, or where a matrix was cut. Nothing is clamped to e4m3's range:
scales leave nothing above it but what rounds to it. Torch is imported when the first function runs.

``x`` is ``[rows, in]``, finite, and destroyed: each function computes in its memory. ``into`` is where the quantized
values go, of the right shape and dtype; what else comes of them is returned. In the bounds ``q`` is what was stored, as
a number (less its zero point), and ``s`` its scale. A value that is not finite gives a scale that is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0
"""The largest finite e4m3 value."""

FP8_SCALE_MIN = 1.0 / (FP8_MAX * 512.0)
"""Of a channel or tensor whose largest value is below 2**-9: one of zeros has no scale of its own."""

FP8_BLOCK_LARGEST_MIN = 1e-4
"""A block is quantized as if its largest value were at least this."""


def fp8_channel(x: torch.Tensor, into: torch.Tensor, origin: torch.Tensor | None = None) -> tuple[torch.Tensor]:
    """e4m3, and a float32 scale ``[rows, 1]`` for each row. ``origin``: ``x`` in the dtype that it came in.

    ``s = max(max|row| / 448, 1 / (448 · 512))`` and ``q = e4m3(x / s)``, to nearest even: vLLM's ``fp8_per_channel``.
    Error: ``|q · s − x| ≤ max(|x| · 2**-4, s · 2**-10) · (1 + 2**-20)``: half a step of a three-bit mantissa, or half
    a step of the subnormals.
    """
    scale = (_largest(x if origin is None else origin) / FP8_MAX).clamp_(min=FP8_SCALE_MIN)
    into.copy_(x.div_(scale))
    return (scale,)


def fp8_tensor(x: torch.Tensor, into: torch.Tensor, largest: float) -> tuple[torch.Tensor]:
    """e4m3, and the one float32 scale ``[1]`` of the matrix of which ``x`` is some rows. ``largest``: its ``max|x|``.

    ``s = max(largest / 448, 1 / (448 · 512))`` and ``q = e4m3(x · (1 / s))``, to nearest even: vLLM's
    ``fp8_per_tensor``. The error is bounded as for channels.
    """
    import torch

    scale = (torch.tensor([largest], dtype=torch.float32, device=x.device) / FP8_MAX).clamp_(min=FP8_SCALE_MIN)
    into.copy_(x.mul_(scale.reciprocal()))
    return (scale,)


def fp8_block(x: torch.Tensor, into: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor]:
    """e4m3, and a float32 scale for each block, counted from the first row and column; the last ones may be smaller.

    ``s = max(max|block|, 10**-4) / 448`` and ``q = e4m3(x · (1 / s))``, to nearest even: vLLM's ``fp8_per_block``. The
    error is bounded as for channels.
    """
    import torch

    high, wide = block
    parts = _in_groups(x, wide)
    across = torch.cat([_largest(part).squeeze(-1) for part in parts], dim=-1)
    missing = -across.shape[0] % high
    largest = torch.nn.functional.pad(across, (0, 0, 0, missing)).view(-1, high, across.shape[1]).amax(dim=1)
    scale = largest.clamp_(min=FP8_BLOCK_LARGEST_MIN) / FP8_MAX
    inverse = scale.reciprocal().repeat_interleave(high, dim=0)[: x.shape[0]]
    for part, factors in zip(parts, torch.split(inverse, [part.shape[1] for part in parts], dim=1), strict=True):
        part.mul_(factors.unsqueeze(-1))
    into.copy_(x)
    return (scale,)


def int8_channel(x: torch.Tensor, into: torch.Tensor, origin: torch.Tensor | None = None) -> tuple[torch.Tensor]:
    """int8, and a float32 scale ``[rows, 1]`` for each row. ``origin``: ``x`` in the dtype that it came in.

    ``s = max|row| / 127.5``, or 2**-23 where that is zero, and ``q = round(clamp(x / s, −128, 127))``, to nearest
    even. Error: ``|q · s − x| ≤ s · (1/2 + 2**-15)``, and at most ``2**-118`` where ``s`` is subnormal.
    """
    scale = _nonzero(_largest(x if origin is None else origin) / 127.5)
    into.copy_(x.div_(scale).clamp_(-128, 127).round_())
    return (scale,)


def int4_group(x: torch.Tensor, into: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor]:
    """int4 packed into int32 ``[rows, in/8]`` (as ``q + 8``, the first in the lowest bits), and a scale of ``dtype``
    ``[rows, in/group]`` for each group of neighbours in a row.

    ``s = max|group| / 7.5``, rounded to ``dtype``, or that dtype's epsilon where it is zero, and
    ``q = round(clamp(x / s, −8, 7))``, to nearest even. Error: ``|q · s − x| ≤ s · (1/2 + 2**-4) + 16 · t`` with the
    smallest positive number ``t`` of ``dtype``.
    """
    groups = x.view(x.shape[0], -1, group)
    scale = _nonzero((_largest(groups) / 7.5).to(dtype))
    _pack(groups.div_(scale.float()).clamp_(-8, 7).round_(), into)
    return (scale.squeeze(-1),)


def int4_group_asymmetric(
    x: torch.Tensor, into: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a zero point ``z`` for each group, packed along rows: int32 ``[⌈rows/8⌉, in/group]`` of ``z + 8``.

    Of a group and zero, ``low`` and ``high`` are the smallest and the largest: ``s`` is ``(high − low) / 15``, rounded
    and never zero as above, ``z = round(clamp(−8 − low / ((high − low) / 15), −8, 7))``, or 0 for a group of zeros, and
    ``q = round(clamp(x / s + z, −8, 7))``. The error is bounded as without zero points.
    """
    groups = x.view(x.shape[0], -1, group)
    low, high = groups.amin(dim=-1, keepdim=True).clamp_(max=0), groups.amax(dim=-1, keepdim=True).clamp_(min=0)
    exact = (high - low) / 15
    zero = (-8 - low / exact).clamp_(-8, 7).round_().nan_to_num_(0)
    scale = _nonzero(exact.to(dtype, copy=True))
    _pack(groups.div_(scale.float()).add_(zero).clamp_(-8, 7).round_(), into)
    return scale.squeeze(-1), _packed_along_rows(zero.squeeze(-1))


def largest(x: torch.Tensor) -> float:
    """``max|x|`` as float32 has it, of any floating point; not finite where some value is not. Changes nothing."""
    return float(_largest(_largest(x).flatten()))


def _largest(x: torch.Tensor) -> torch.Tensor:
    """``max|x|`` over the last axis, which stays with length one, as float32; not finite where some value is not."""
    import torch

    if x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu":
        return _largest_by_bits(x)
    return _largest_by_values(x)


def _largest_by_values(x: torch.Tensor) -> torch.Tensor:
    import torch

    # Not abs().amax(): a temporary of full size less.
    return torch.maximum(x.amax(dim=-1, keepdim=True), x.amin(dim=-1, keepdim=True).neg_()).to(torch.float32)


def _largest_by_bits(x: torch.Tensor) -> torch.Tensor:
    """The same of 16 bits each, on the host, as the integers that their bits are: five times as fast. Of one sign,
    magnitudes are in the order of the bits: infinity above all numbers, NaN above infinity.
    """
    import numpy as np
    import torch

    bits = x.view(torch.int16).numpy()
    positive = bits.max(axis=-1, keepdims=True).clip(min=0)  # negative where there is none
    negative = (
        bits.view(np.uint16).max(axis=-1, keepdims=True).view(np.int16) & 0x7FFF
    )  # of the others, if there is none
    return torch.from_numpy(np.maximum(positive, negative)).view(x.dtype).to(torch.float32)


def _in_groups(x: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Views of the columns in groups ``[rows, groups, size]``, and of those that are left as one smaller group."""
    rows, columns = x.shape
    full = columns // size
    whole = x[:, : full * size].view(rows, full, size)
    return (whole, x[:, full * size :].unsqueeze(1)) if columns % size else (whole,)


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    import torch

    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)


def _pack(q: torch.Tensor, into: torch.Tensor) -> None:
    """Whole numbers from −8 to 7, eight of which in a row make an int32 of ``into``."""
    import torch

    pairs = q.add_(8).to(torch.int8).flatten().view(torch.int16)  # to uint8 would be ten times slower
    into.flatten().view(torch.uint8).copy_(pairs | (pairs >> 4))


def _packed_along_rows(q: torch.Tensor) -> torch.Tensor:
    """``[rows, n]`` of such numbers → int32 ``[⌈rows/8⌉, n]``. Rows that are not there have bits of zero."""
    import torch

    rows, columns = q.shape
    into = torch.empty((columns, -(-rows // 8)), dtype=torch.int32, device=q.device)
    _pack(torch.nn.functional.pad(q.T, (0, -rows % 8), value=-8.0), into)
    return into.T.contiguous()
