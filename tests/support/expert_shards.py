"""What one rank of a model with experts holds, the naive way: whole tensors, split, indexed and concatenated by torch.

Shares nothing with the loader: no plan, no boxes, no offsets. The rules are written as an engine's modules have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.expert_models import has_experts

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Spot:
    """A rank's place in every kind of parallelism."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    round_robin: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As ``build_config`` and ``attach`` take it."""
        return {
            "tp_size": self.tp,
            "tp_rank": self.tp_rank,
            "ep_size": self.ep,
            "ep_rank": self.ep_rank,
            "pp_size": self.pp,
            "pp_rank": self.pp_rank,
            "expert_placement": "round_robin" if self.round_robin else "linear",
        }


def shard(tensors: Tensors, config: Mapping[str, Any], spot: Spot) -> dict[str, torch.Tensor]:
    """Parameter name → value, under vLLM 0.32's names. Tied heads are the embedding itself."""
    is_gpt_oss, is_deepseek = config["model_type"] == "gpt_oss", config["model_type"].startswith("deepseek")
    stages = layers_by_stage(config["num_hidden_layers"], spot.pp)
    first, last = spot.pp_rank == 0, spot.pp_rank == spot.pp - 1
    everywhere, tied = not is_deepseek, config["tie_word_embeddings"]
    embedding = "model.embedding.weight" if is_gpt_oss else "model.embed_tokens.weight"
    made = {}
    if first or everywhere or (tied and last):
        made[embedding] = vocabulary(tensors["model.embed_tokens.weight"], spot)
    if last or everywhere:
        made["model.norm.weight"] = tensors["model.norm.weight"]
        made["lm_head.weight"] = made[embedding] if tied else vocabulary(tensors["lm_head.weight"], spot)
    for layer in stages[spot.pp_rank]:
        at = f"model.layers.{layer}."
        inside = {name.removeprefix(at): value for name, value in tensors.items() if name.startswith(at)}
        made |= {at + name: value for name, value in one_layer(inside, config, layer, spot).items()}
    return made


def layers_by_stage(count: int, stages: int) -> list[list[int]]:
    """As vLLM has it: an even share each; what is left over goes to the stages before the last, backwards."""
    shares = [count // stages] * stages
    for position in range(count % stages):
        shares[-2 - position] += 1
    numbers = iter(range(count))
    return [[next(numbers) for _ in range(share)] for share in shares]


def vocabulary(tensor: torch.Tensor, spot: Spot) -> torch.Tensor:
    padding = torch.zeros(-len(tensor) % 64, *tensor.shape[1:], dtype=tensor.dtype)
    return torch.cat([tensor, padding]).chunk(spot.tp)[spot.tp_rank]


def one_layer(inside: Tensors, config: Mapping[str, Any], layer: int, spot: Spot) -> dict[str, torch.Tensor]:
    made = {name: inside[name] for name in inside if "layernorm" in name or "_norm" in name}
    if "kv_lora_rank" in config:
        made |= latent_attention(inside, config, spot)
    else:
        attention = grouped_attention(inside, config, spot)
        if config["model_type"] == "gpt_oss":
            attention = {name.replace("self_attn", "attn"): value for name, value in attention.items()}
            attention["attn.sinks"] = inside["self_attn.sinks"].chunk(spot.tp)[spot.tp_rank]
        made |= attention
    if has_experts(config, layer):
        return made | experts(inside, config, spot)
    return made | mlp("mlp", inside, spot)


def mlp(at: str, inside: Tensors, spot: Spot) -> dict[str, torch.Tensor]:
    gate, up, down = (inside[f"{at}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return {
        f"{at}.gate_up_proj.weight": torch.cat([rows(gate, spot), rows(up, spot)]),
        f"{at}.down_proj.weight": columns(down, spot),
    }


def rows(tensor: torch.Tensor, spot: Spot) -> torch.Tensor:
    return tensor.chunk(spot.tp)[spot.tp_rank]


def columns(tensor: torch.Tensor, spot: Spot) -> torch.Tensor:
    return tensor.chunk(spot.tp, dim=1)[spot.tp_rank]


def grouped_attention(inside: Tensors, config: Mapping[str, Any], spot: Spot) -> dict[str, torch.Tensor]:
    kv_heads, made = config["num_key_value_heads"], {}
    for ending in ("weight", "bias"):
        if f"self_attn.q_proj.{ending}" in inside:
            query, *pair = (inside[f"self_attn.{name}_proj.{ending}"] for name in "qkv")
            heads = [tensor.reshape(kv_heads, -1, *tensor.shape[1:]) for tensor in pair]
            copies = [tensor.repeat_interleave(max(1, spot.tp // kv_heads), dim=0) for tensor in heads]
            local = [rows(tensor, spot).flatten(0, 1) for tensor in copies]
            made[f"self_attn.qkv_proj.{ending}"] = torch.cat([rows(query, spot), *local])
    made["self_attn.o_proj.weight"] = columns(inside["self_attn.o_proj.weight"], spot)
    if "self_attn.o_proj.bias" in inside:
        made["self_attn.o_proj.bias"] = inside["self_attn.o_proj.bias"]
    return made


def latent_attention(inside: Tensors, config: Mapping[str, Any], spot: Spot) -> dict[str, torch.Tensor]:
    heads = config["num_attention_heads"]

    def by_heads(name: str) -> torch.Tensor:
        tensor = inside[f"self_attn.{name}.weight"]
        return rows(tensor.reshape(heads, -1, tensor.shape[1]), spot).flatten(0, 1)

    compressed = inside["self_attn.kv_a_proj_with_mqa.weight"]
    made = {
        "self_attn.kv_b_proj.weight": by_heads("kv_b_proj"),
        "self_attn.o_proj.weight": columns(inside["self_attn.o_proj.weight"], spot),
    }
    if config["q_lora_rank"] is None:
        made["self_attn.kv_a_proj_with_mqa.weight"] = compressed
        made["self_attn.q_proj.weight"] = by_heads("q_proj")
    else:
        both = [inside["self_attn.q_a_proj.weight"], compressed]
        made["self_attn.fused_qkv_a_proj.weight"] = torch.cat(both)
        made["self_attn.q_b_proj.weight"] = by_heads("q_b_proj")
    return made


def local_experts(count: int, spot: Spot) -> list[int]:
    """Dealt in turn, or in heaps of which the first are one larger."""
    if spot.round_robin:
        return [expert for expert in range(count) if expert % spot.ep == spot.ep_rank]
    return [int(expert) for expert in torch.arange(count).tensor_split(spot.ep)[spot.ep_rank]]


def experts(inside: Tensors, config: Mapping[str, Any], spot: Spot) -> dict[str, torch.Tensor]:
    within = spot if spot.ep == 1 else Spot()
    if config["model_type"] == "gpt_oss":
        return stacked_experts(inside, config, spot, within)
    if config["model_type"] == "mixtral":
        at, projections = "block_sparse_moe", ("w1", "w3", "w2")
    else:
        at, projections = "mlp", ("gate_proj", "up_proj", "down_proj")
    made = {name: inside[name] for name in inside if ".gate." in name or ".shared_expert_gate." in name}
    for shared in ("mlp.shared_expert", "mlp.shared_experts"):
        if f"{shared}.up_proj.weight" in inside:
            made |= mlp(shared, inside, spot)
    count = len([name for name in inside if name.endswith(f".{projections[2]}.weight") and ".experts." in name])
    w13, w2 = [], []
    for expert in local_experts(count, spot):
        gate, up, down = (inside[f"{at}.experts.{expert}.{projection}.weight"] for projection in projections)
        w13.append(torch.cat([rows(gate, within), rows(up, within)]))
        w2.append(columns(down, within))
    made[f"{at}.experts.routed_experts.w13_weight"] = torch.stack(w13)
    made[f"{at}.experts.routed_experts.w2_weight"] = torch.stack(w2)
    return made


def stacked_experts(inside: Tensors, config: Mapping[str, Any], spot: Spot, within: Spot) -> dict[str, torch.Tensor]:
    here = local_experts(config["num_local_experts"], spot)
    gate_up, down = (inside[f"mlp.experts.{name}_proj"][here] for name in ("gate_up", "down"))
    gate_up_bias, down_bias = (inside[f"mlp.experts.{name}_proj_bias"][here] for name in ("gate_up", "down"))
    at = "mlp.experts.routed_experts"
    return {
        "mlp.router.weight": inside["mlp.router.weight"],
        "mlp.router.bias": inside["mlp.router.bias"],
        f"{at}.w13_weight": gate_up.chunk(within.tp, dim=2)[within.tp_rank].transpose(1, 2),
        f"{at}.w13_bias": gate_up_bias.chunk(within.tp, dim=1)[within.tp_rank],
        f"{at}.w2_weight": down.chunk(within.tp, dim=1)[within.tp_rank].transpose(1, 2),
        f"{at}.w2_bias": down_bias if within.tp_rank == 0 else torch.zeros_like(down_bias),
    }
