"""DeepSeek-V2 and V3: attention over a compressed key/value cache (MLA), dense layers first, then experts of which some
are shared by all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from weightcached.loader.architectures.blocks import Where
from weightcached.loader.architectures.experts import Experts, after_the_dense, without
from weightcached.loader.architectures.llama import ROTARY, TIED_HEAD, decoder, gated_mlp
from weightcached.loader.architectures.ranks import Rank
from weightcached.loader.architectures.rows import Part, Replicated, RowRange, Wanted, stacked
from weightcached.loader.architectures.shape import ModelShape, Size, SizeRule, named, product
from weightcached.loader.architectures.table import Architecture, DraftLayers
from weightcached.loader.boxes import Box, whole


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: down-projections whole on every rank, up-projections cut by heads.

    With ``q_lora_rank`` the two down-projections are one parameter, query above key/value; without, queries are
    projected at once.
    """

    name: str

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        at, hidden, latent = self.name, model.size("hidden"), model.number("kv_lora_rank")
        nope, rope, value = (model.number(f"{part}_head_dim") for part in ("qk_nope", "qk_rope", "v"))
        compressed = RowRange(f"{at}.kv_a_proj_with_mqa", latent + rope, 0, latent + rope)
        if model.value("q_lora_rank") is None:
            yield from stacked(compressed.source, [compressed], hidden, part_kind="replicated")
            yield from _by_heads(f"{at}.q_proj", nope + rope, hidden, model, rank)
        else:
            queries = model.number("q_lora_rank")
            parts = [RowRange(f"{at}.q_a_proj", queries, 0, queries), compressed]
            yield from stacked(f"{at}.fused_qkv_a_proj", parts, hidden, part_kind="replicated")
            yield _norm(f"{at}.q_a_layernorm.weight", queries)
            yield from _by_heads(f"{at}.q_b_proj", nope + rope, queries, model, rank)
        yield _norm(f"{at}.kv_a_layernorm.weight", latent)
        yield from _by_heads(f"{at}.kv_b_proj", nope + value, latent, model, rank)
        yield _output(f"{at}.o_proj.weight", hidden, value, model, rank)


def _by_heads(name: str, head: int, inputs: int, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
    """A linear layer cut by output rows, ``head`` of them for each attention head."""
    heads = model.size("heads")
    kept = rank.share(heads, f"{heads} query heads") * head
    yield from stacked(name, [RowRange(name, heads * head, rank.index * kept, kept)], inputs)


def _output(name: str, hidden: int, head: int, model: ModelShape, rank: Rank) -> Wanted:
    """The output projection, cut by input columns, ``head`` of them for each attention head."""
    heads = model.size("heads")
    kept = rank.share(heads, f"{heads} query heads") * head
    box = Box((0, rank.index * kept), (hidden, kept))
    part = Part(name, (hidden, heads * head), box, whole(box.shape))
    return Wanted(name, box.shape, "row", (part,), linear=True)


def _norm(name: str, size: int) -> Wanted:
    return Wanted(name, (size,), "replicated", (Part(name, (size,), whole((size,)), whole((size,))),))


def _shares_experts(model: ModelShape, _: int) -> bool:
    return model.count("n_shared_experts") > 0


def _corrects_scores(model: ModelShape, _: int) -> bool:
    """As vLLM decides it; Transformers has no such key, and the correction always in V3."""
    assumed = "noaux_tc" if model.config.get("model_type") == "deepseek_v3" else None
    return bool(model.config.get("topk_method", assumed) == "noaux_tc")


ROWS = decoder(
    (LatentAttention("self_attn"),),
    (
        Where(
            after_the_dense,
            (
                Replicated("mlp.gate.weight", ("experts", "hidden")),
                Where(
                    _corrects_scores,
                    (Replicated("mlp.gate.e_score_correction_bias", ("experts",), dtype="float32"),),
                ),
                Experts("mlp.experts.routed_experts", source="mlp.experts"),
                Where(_shares_experts, gated_mlp("mlp.shared_experts", intermediate="shared_intermediate")),
            ),
        ),
        Where(without(after_the_dense), gated_mlp("mlp")),
    ),
)
SIZES: Mapping[Size, SizeRule] = {
    "experts": named("n_routed_experts"),
    "expert_intermediate": named("moe_intermediate_size"),
    "shared_intermediate": product("n_shared_experts", "moe_intermediate_size"),
}
DRAFT = DraftLayers(
    "model.layers",
    count="layers",
    key="num_nextn_predict_layers",
    reason="a draft layer (num_nextn_predict_layers): speculative decoding loads it as a model of its own",
)

DEEPSEEK_V2 = Architecture(
    names=("DeepseekV2ForCausalLM",),
    rows=ROWS,
    ignored=(*ROTARY, TIED_HEAD, DRAFT),
    defaults={"moe_layer_freq": 1, "n_shared_experts": 2, "n_routed_experts": 64, "q_lora_rank": 1536},
    sizes=SIZES,
)

DEEPSEEK_V3 = Architecture(
    names=("DeepseekV3ForCausalLM",),
    rows=ROWS,
    ignored=(*ROTARY, TIED_HEAD, DRAFT),
    defaults={
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "q_lora_rank": 1536,
    },
    sizes=SIZES,
)
