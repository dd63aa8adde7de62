"""Experts become one tensor: of one each in the files, or out of a stack that the files have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcached.loader.reference.names import Place
from weightcached.loader.reference.ranks import Ranks


def stacked(each: Sequence[torch.Tensor], place: Place) -> torch.Tensor:
    """One for each expert. A scalar that is an expert's only one has no axis of its own."""
    made = torch.stack(list(each))
    is_one_scalar = place.suffix in ("weight_scale", "input_scale", "input_zero_point") and made.shape[1:] == (1,)
    return made.squeeze(1) if is_one_scalar else made


def of_a_stack(tensor: torch.Tensor, place: Place, ranks: Ranks) -> torch.Tensor:
    """Of ``[experts, out, in]``, where gate is above up. Else GPT-OSS's: ``[experts, in, out]``, or in blocks of 32
    inputs ``[experts, out, in / 32, 16]``.

    There gate and up alternate along the outputs, and stay so; the second bias is there once: other ranks have zeros.
    """
    is_first = place.kind.startswith("w13")
    match place.suffix:
        case "stack" if is_first:
            return torch.cat([ranks.share(half, 1) for half in tensor.chunk(2, 1)], 1)
        case "stack":
            return ranks.share(tensor, 2)
        case "turned_stack":
            return ranks.share(tensor, 2 if is_first else 1).transpose(1, 2)
        case "bias" if is_first:
            return ranks.share(tensor, 1)
        case "bias":
            return tensor if ranks.index == 0 else torch.zeros_like(tensor)
        case "blocks":
            return ranks.share(tensor, 1 if is_first else 2).flatten(2)
    return ranks.share(tensor, 1 if is_first else 2)
