"""How ranks share each kind of layer, and how the layer's parts become one: tensors are cut by their own extents.

A layer is shared along its outputs or its inputs. Which axis of a tensor that is follows from what the tensor is called
(``weight`` is ``[out, in]``, ``qweight`` ``[in / 8, out]``); one that is packed, or has a scale for a group or a block,
is cut at the same fraction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from weightcached.loader.reference.names import PARTS
from weightcached.loader.reference.ranks import NotCompared, Ranks

Way = Literal["heads", "outputs", "inputs", "vocabulary", "whole"]

LINEAR: dict[str, Way] = {
    "qkv_proj": "heads",
    "attn.c_attn": "heads",
    "gate_up_proj": "outputs",
    "q_proj": "outputs",
    "q_b_proj": "outputs",
    "kv_b_proj": "outputs",
    "mlp.c_fc": "outputs",
    "intermediate.dense": "outputs",
    "w13": "outputs",
    "o_proj": "inputs",
    "down_proj": "inputs",
    "c_proj": "inputs",
    "output.dense": "inputs",
    "w2": "inputs",
    "fused_qkv_a_proj": "whole",
    "kv_a_proj_with_mqa": "whole",
}
"""The last words of a linear layer's name. An online quantization takes these, and no others."""

OTHERS: dict[str, Way] = {
    "embed_tokens": "vocabulary",
    "model.embedding": "vocabulary",
    "lm_head": "vocabulary",
    "wte": "vocabulary",
    "word_embeddings": "vocabulary",
    "position_embeddings": "vocabulary",
    "token_type_embeddings": "vocabulary",
    "classifier": "whole",
    "pooler.dense": "whole",
    "mlm_head.dense": "whole",
    "mlm_head.layer_norm": "whole",
    "mlm_head.decoder": "whole",
    **dict.fromkeys(("wpe", "gate", "router", "shared_expert_gate"), "whole"),
    **dict.fromkeys(("norm", "ln_1", "ln_2", "ln_f", "LayerNorm", "q_norm", "k_norm"), "whole"),
    **dict.fromkeys(("q_a_layernorm", "kv_a_layernorm", "input_layernorm", "post_attention_layernorm"), "whole"),
    **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), "whole"),
}


class Axes(NamedTuple):
    """Which axis of a tensor runs along the layer's outputs and which along its inputs, if any."""

    outputs: int | None
    inputs: int | None


_AXES = {
    **dict.fromkeys(("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"), Axes(0, 1)),
    **dict.fromkeys(("qweight", "qzeros", "scales"), Axes(1, 0)),
    **dict.fromkeys(("weight_g_idx", "g_idx"), Axes(None, 0)),
    **dict.fromkeys(("weight_shape", "input_scale", "input_zero_point"), Axes(None, None)),
    "bias": Axes(0, None),
    "blocks": Axes(0, 1),
    "block_scales": Axes(0, 1),
}
_BY_GROUP = ("weight_scale", "weight_zero_point", "qzeros", "scales")


def way_of(module: str) -> Way | None:
    """How ranks share the layers of this name, by as many of its last words as are known."""
    words = module.split(".")
    endings = (".".join(words[-count:]) for count in (2, 1))
    return next((way for ending in endings if (way := LINEAR.get(ending) or OTHERS.get(ending))), None)


def is_linear(module: str) -> bool:
    return any(f".{module}".endswith(f".{words}") for words in LINEAR)


def axes_of(suffix: str, tensor: torch.Tensor, *, activation_order: bool) -> Axes:
    """Of a tensor with this ending of its name. One element along the inputs is one for all of them."""
    if suffix not in _AXES:
        raise NotCompared(f"no rule for tensors called {suffix}")
    outputs, inputs = _AXES[suffix]
    if tensor.dim() < 2 and suffix in ("weight_scale", "weight_scale_inv"):
        return Axes(None, None)
    is_for_all = inputs is not None and tensor.shape[inputs] == 1
    if is_for_all or (activation_order and suffix in _BY_GROUP):
        inputs = None
    return Axes(outputs, inputs)


def in_parts(tensor: torch.Tensor, module: str, axis: int | None, heads: tuple[int, int, int]) -> list[torch.Tensor]:
    """What is one tensor in the files, part by part; a scale of all of them is each one's."""
    word = module.rpartition(".")[2]
    if word not in PARTS:
        return [tensor]
    if axis is None:
        return [tensor] * PARTS[word]
    sizes = heads if PARTS[word] == 3 else (1, 1)
    unit, ends = tensor.shape[axis] // sum(sizes), itertools.accumulate(sizes)
    return [tensor.narrow(axis, (end - size) * unit, size * unit) for size, end in zip(sizes, ends, strict=True)]


def cut(tensor: torch.Tensor, way: Way, axes: Axes, ranks: Ranks, heads: int | None = None) -> torch.Tensor:
    """This rank's of one part. ``heads``: where ranks are more than these, several have the same."""
    axis = axes.inputs if way == "inputs" else axes.outputs
    return tensor if way == "whole" or axis is None else ranks.share(tensor, axis, heads)


def fused(parts: Sequence[torch.Tensor], axes: Axes, *, last: bool) -> torch.Tensor:
    """One below the other; scalars side by side; or the last."""
    if last:
        return parts[-1] if parts[-1].dim() else parts[-1].reshape(1)
    if axes.outputs is None:
        return torch.stack([part.reshape(()) for part in parts])
    return torch.cat(list(parts), axes.outputs)
