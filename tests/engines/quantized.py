"""Checkpoints that compressed-tensors quantizes from a case's plain one, for vLLM to load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from tests.engines.cases.case import Tensors
from tests.support.checkpoints import RawTensor

CODES = {torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.bfloat16: "BF16", torch.float32: "F32"}


def by_compressed_tensors(
    format_: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> Callable[[dict[str, Any], Tensors], None]:
    """A case's ``edit``: quantizes every linear layer but the head, in float32; scales are kept as the engine does."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs)
    compressor = BaseCompressor.get_value_from_registry(format_)

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": format_,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            raw = tensors.pop(name)
            weight = torch.frombuffer(bytearray(raw.data), dtype=torch.bfloat16).view(raw.shape).float()
            groups = weight.unflatten(-1, (-1, scheme.weights.group_size or weight.shape[-1]))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
            for suffix, tensor in compressor.compress(state, scheme).items():
                kept = tensor.to(scheme.weights.scale_dtype or tensor.dtype) if suffix == "weight_scale" else tensor
                tensors[name.removesuffix("weight") + suffix] = _raw(kept)

    return edit


def _raw(tensor: torch.Tensor) -> RawTensor:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return RawTensor(CODES[tensor.dtype], tuple(tensor.shape), data)
