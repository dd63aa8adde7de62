"""Small models with experts: their ``config.json`` and the tensors that Transformers writes for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.checkpoints import raw_tensor, write_checkpoint

Shapes = dict[str, tuple[int, ...]]

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "vocab_size": 500,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "moe_intermediate_size": 16,
    "n_routed_experts": 7,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 5,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "head_dim": 4,  # hidden over heads: this family has no other
        "num_experts": 6,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **LATENT,
        "q_lora_rank": None,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **LATENT,
        "q_lora_rank": 10,
        "n_shared_experts": 1,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 5,
        "attention_bias": True,
    },
}


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    """``config.json`` of a small model of the family."""
    return {**COMMON, **CONFIGS[family], **overrides}


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    match config["model_type"]:
        case "qwen2_moe" | "qwen3_moe":
            return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0
        case "deepseek_v2" | "deepseek_v3":
            return layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0
    return True


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """Tensor name → shape."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config, layer)}
    return shapes


def write(directory: Path, config: Mapping[str, Any], *, code: str = "BF16") -> Path:
    """Write a checkpoint of the model, in one file. Returns ``directory``."""
    tensors = {name: raw_tensor(name, shape, code) for name, shape in shapes_of(config).items()}
    return write_checkpoint(directory, config, {"model.safetensors": tensors})


def _layer(config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from _latent_attention(config) if "kv_lora_rank" in config else _attention(config)
    if not has_experts(config, layer):
        yield from _mlp("mlp", hidden, config["intermediate_size"])
        return
    match config["model_type"]:
        case "mixtral":
            yield "block_sparse_moe.gate.weight", (config["num_local_experts"], hidden)
            for expert in range(config["num_local_experts"]):
                at, inner = f"block_sparse_moe.experts.{expert}", config["intermediate_size"]
                yield f"{at}.w1.weight", (inner, hidden)
                yield f"{at}.w2.weight", (hidden, inner)
                yield f"{at}.w3.weight", (inner, hidden)
        case "gpt_oss":
            experts, inner = config["num_local_experts"], config["intermediate_size"]
            yield "mlp.router.weight", (experts, hidden)
            yield "mlp.router.bias", (experts,)
            yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)
            yield "mlp.experts.gate_up_proj_bias", (experts, 2 * inner)
            yield "mlp.experts.down_proj", (experts, inner, hidden)
            yield "mlp.experts.down_proj_bias", (experts, hidden)
        case _:
            yield from _routed(config)


def _routed(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts = config.get("num_experts") or config["n_routed_experts"]
    yield "mlp.gate.weight", (experts, hidden)
    for expert in range(experts):
        yield from _mlp(f"mlp.experts.{expert}", hidden, inner)
    match config["model_type"]:
        case "qwen2_moe":
            yield "mlp.shared_expert_gate.weight", (1, hidden)
            yield from _mlp("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
        case "deepseek_v2" | "deepseek_v3":
            if config["topk_method"] == "noaux_tc":
                yield "mlp.gate.e_score_correction_bias", (experts,)
            yield from _mlp("mlp.shared_experts", hidden, config["n_shared_experts"] * inner)


def _mlp(at: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (inner, hidden)
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)


def _attention(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    family, hidden, head = config["model_type"], config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"self_attn.{name}.weight", (rows, hidden)
        if family in ("qwen2_moe", "gpt_oss"):
            yield f"self_attn.{name}.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if family == "gpt_oss":
        yield "self_attn.o_proj.bias", (hidden,)
        yield "self_attn.sinks", (config["num_attention_heads"],)
    if family == "qwen3_moe":
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)


def _latent_attention(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, latent, rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if rank is None:
        yield "self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    else:
        yield "self_attn.q_a_proj.weight", (rank, hidden)
        yield "self_attn.q_a_layernorm.weight", (rank,)
        yield "self_attn.q_b_proj.weight", (heads * (nope + rope), rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * value)
