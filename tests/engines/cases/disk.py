"""Checkpoints that are quantized already.

What vLLM 0.32 refuses on a CPU is not here: fp8 without scales for inputs, GPTQ of 8 bits, and experts of AWQ, GPTQ,
MXFP4 and compressed-tensors integers. fp8 in blocks needs a processor with AMX. On no device does it take activation
order with groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.engines.cases.case import Case, Tensors
from tests.engines.cases.dense import LLAMA as DENSE
from tests.engines.cases.experts import V3
from tests.support.quantized import Stored, bits, raw
from tests.support.quantized_cases import CASES as WAYS
from tests.support.quantized_cases import gptq

LLAMA = {**DENSE, "intermediate_size": 512}
"""Eight ranks have 64 inner inputs each: what the engine's integer kernels need."""

PHI3 = {**LLAMA, "model_type": "phi3", "pad_token_id": 0}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
UNCALIBRATED = ("attn.q_scale", "attn.k_scale", "attn.v_scale", "attn.prob_scale")
ZERO_POINTS = ("attn.q_zero_point", "attn.k_zero_point", "attn.v_zero_point")

GPTQ = (
    Stored("qweight", "I32", lambda o, i: (i // 8, o), 1),
    Stored("qzeros", "I32", lambda o, i: (i // 32, o // 8), 1),
    Stored("scales", "BF16", lambda o, i: (i // 32, o), 1),
    Stored("g_idx", "I32", lambda o, i: (i,), needed=False),
)

IN_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
OF_BLOCKS = (
    Stored("weight", "F8_E4M3", lambda o, i: (o, i), 0),
    Stored("weight_scale_inv", "F32", lambda o, i: (-(-o // 128), -(-i // 128)), 0),
)
WIDE_HEADS = {**LLAMA, "hidden_size": 512, "num_attention_heads": 4, "head_dim": 128}
"""Blocks of 128 are whole for four ranks: one head each."""
DEEPSEEK = {
    **V3,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 512,
    "n_routed_experts": 4,
}


def stored(
    quantization: Mapping[str, Any], scheme: Sequence[Stored], kv_scales: Sequence[str] = (), code: str = "BF16"
) -> Callable[[dict[str, Any], Tensors], None]:
    """The edit that quantizes every linear layer but the head, and gives each layer KV-cache scales of these names."""

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        config["quantization_config"] = dict(quantization)
        for name in [name for name in tensors if ("proj" in name and name.endswith(".weight")) or ".experts." in name]:
            outputs, inputs = tensors.pop(name).shape
            for one in scheme:
                tensor = f"{name.removesuffix('.weight')}.{one.suffix}"
                # The engine casts a scale of a group to the model's dtype; we are not asked to.
                of = "BF16" if one.code == "F16" else one.code
                tensors[tensor] = raw(bits(tensor, one.shape(outputs, inputs), of))
        for layer in range(config["num_hidden_layers"]):
            for scale in kv_scales:
                tensor = f"model.layers.{layer}.self_attn.{scale}"
                tensors[tensor] = raw(bits(tensor, (), code))

    return edit


def _case(name: str, way: str, own: Sequence[str], **more: Any) -> Case:
    quantization, scheme = WAYS[way]
    return Case(name, more.pop("config", LLAMA), edit=stored(quantization, scheme), engine_only=tuple(own), **more)


def _in_blocks(name: str, config: Mapping[str, Any], **more: Any) -> Case:
    edit = stored(IN_BLOCKS, OF_BLOCKS)
    return Case(name, config, (1, 2, 4), edit=edit, engine_only=UNCALIBRATED, processor="amx_tile", **more)


_FP8, _FP8_SCHEME = WAYS["fp8, static inputs"]
_CHANNELS, _CHANNELS_SCHEME = WAYS["fp8, channels"]
_COMPRESSED = (*UNCALIBRATED[:3], *ZERO_POINTS)

CASES = (
    _case("llama-fp8-tensor", "fp8, one scale a tensor", UNCALIBRATED),
    Case(
        "llama-fp8-static-kv",
        LLAMA,
        edit=stored(_FP8, _FP8_SCHEME, ("k_proj.k_scale", "v_proj.v_scale", "q_scale", "prob_output_scale")),
    ),
    Case(
        "llama-fp8-channel-kv",
        LLAMA,
        edit=stored(_CHANNELS, _CHANNELS_SCHEME, ("k_scale", "attn.v_scale", "q_scale"), "F32"),
        engine_only=ZERO_POINTS,
    ),
    _case("phi3-fp8-static", "fp8, static inputs", UNCALIBRATED, config=PHI3),
    _case("llama-int8-channel", "int8, channels", _COMPRESSED),
    _case("llama-int8-static", "int8, static inputs with zero points", _COMPRESSED),
    _case("llama-int4-group", "int4, groups", _COMPRESSED),
    _case("llama-int4-zero-points", "int4, groups with zero points", _COMPRESSED),
    _case("llama-int4-channel", "int4, channels", _COMPRESSED),
    _case("llama-awq", "awq", ()),
    Case("llama-gptq", LLAMA, edit=stored(gptq(group_size=32), GPTQ)),
    _case("mixtral-fp8-tensor", "fp8, one scale a tensor", UNCALIBRATED, config=MIXTRAL),
    _case("mixtral-fp8-static", "fp8, static inputs", UNCALIBRATED, config=MIXTRAL),
    _case("mixtral-fp8-channel", "fp8, channels", _COMPRESSED, config=MIXTRAL),
    _in_blocks("llama-fp8-blocks", WIDE_HEADS),
    _in_blocks("mixtral-fp8-blocks", {**WIDE_HEADS, "model_type": "mixtral", "num_local_experts": 4}),
    _in_blocks("deepseek-v3-fp8-blocks", DEEPSEEK, options={"dtype": "bfloat16"}),
)
