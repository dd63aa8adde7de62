"""Decoders with experts: sliced, whole on each rank, and on pipeline stages."""

import re
from typing import Any

from tests.engines.cases.case import DECODER, Case, Tensors
from tests.support.checkpoints import RawTensor

MIXTRAL = {**DECODER, "model_type": "mixtral", "num_local_experts": 10}
QWEN2 = {
    **DECODER,
    "model_type": "qwen2_moe",
    "num_experts": 10,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
}
QWEN3 = {
    **DECODER,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 10,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "decoder_sparse_step": 2,
}
DEEPSEEK = {
    **DECODER,
    "num_key_value_heads": 8,
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 10,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
V2 = {**DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None}
V3 = {**DEEPSEEK, "model_type": "deepseek_v3", "q_lora_rank": 48, "topk_method": "noaux_tc"}
GPT_OSS = {
    **DECODER,
    "model_type": "gpt_oss",
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_local_experts": 10,
}
"""As many key/value heads as ranks, and 32 rows of an expert or a multiple: of others vLLM 0.32 makes none here."""

IN_BF16 = {"dtype": "bfloat16"}
"""Transformers keeps DeepSeek's router in float32, vLLM makes it what the model is."""


def in_stacks(config: dict[str, Any], tensors: Tensors) -> None:
    """The edit that puts a layer's experts into one tensor, as Transformers saves with save_original_format=False.

    vLLM reads Qwen's like that, and neither Mixtral's nor DeepSeek's.
    """
    layers: dict[str, dict[tuple[int, str], RawTensor]] = {}
    for name in list(tensors):
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            layers.setdefault(match[1], {})[int(match[2]), match[3]] = tensors.pop(name)
    for at, each in layers.items():
        count, (inner, hidden) = len(each) // 3, each[0, "gate"].shape
        gate_up = b"".join(each[expert, part].data for expert in range(count) for part in ("gate", "up"))
        down = b"".join(each[expert, "down"].data for expert in range(count))
        tensors[f"{at}.gate_up_proj"] = RawTensor("BF16", (count, 2 * inner, hidden), gate_up)
        tensors[f"{at}.down_proj"] = RawTensor("BF16", (count, hidden, inner), down)


CASES = (
    Case("mixtral", MIXTRAL),
    Case("mixtral-whole-experts", MIXTRAL, tp_sizes=(2, 4, 8), expert_placement="linear"),
    Case("mixtral-stages", {**MIXTRAL, "num_hidden_layers": 5}, tp_sizes=(1, 2), pp_sizes=(2, 3)),
    Case("qwen2-moe", QWEN2),
    Case("qwen2-moe-stages", {**QWEN2, "tie_word_embeddings": True}, tp_sizes=(1, 2), pp_sizes=(2, 3)),
    Case("qwen3-moe", QWEN3),
    Case("qwen3-moe-whole-experts", QWEN3, tp_sizes=(2, 4), expert_placement="linear"),
    Case("qwen2-moe-stacks", QWEN2, edit=in_stacks),
    Case("qwen3-moe-stacks-whole-experts", QWEN3, tp_sizes=(2,), expert_placement="linear", edit=in_stacks),
    Case("deepseek-v2", V2, options=IN_BF16),
    Case("deepseek-v3", V3, options=IN_BF16),
    Case("deepseek-v3-whole-experts", V3, tp_sizes=(2, 4), expert_placement="linear", options=IN_BF16),
    Case("deepseek-v3-experts-in-turn", V3, tp_sizes=(2, 4), expert_placement="round_robin", options=IN_BF16),
    Case("deepseek-v3-stages", V3, tp_sizes=(1, 2), pp_sizes=(2, 3), options=IN_BF16),
    Case("gpt-oss", GPT_OSS),
    Case("gpt-oss-whole-experts", GPT_OSS, tp_sizes=(2,), expert_placement="linear"),
    Case("gpt-oss-stages", {**GPT_OSS, "num_hidden_layers": 5}, tp_sizes=(1, 2), pp_sizes=(2, 3)),
    Case("llama-stages", {**DECODER, "model_type": "llama", "num_hidden_layers": 5}, tp_sizes=(1, 2), pp_sizes=(2, 3)),
    Case(
        "llama-tied-stages",
        {**DECODER, "model_type": "llama", "num_hidden_layers": 5, "tie_word_embeddings": True},
        tp_sizes=(1, 2),
        pp_sizes=(2, 3),
    ),
    Case("qwen3-stages", {**DECODER, "model_type": "qwen3", "num_hidden_layers": 5}, tp_sizes=(1,), pp_sizes=(2, 3)),
)
