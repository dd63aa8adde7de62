"""Qwen2 (biases on query, key and value), Qwen3 (norms over query and key heads, a head size of its own), and both with
experts.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightcached.loader.architectures.blocks import Where
from weightcached.loader.architectures.experts import Experts, every_nth, without
from weightcached.loader.architectures.llama import ROTARY, TIED_HEAD, attention, decoder, gated_mlp
from weightcached.loader.architectures.rows import Replicated
from weightcached.loader.architectures.shape import ModelShape, Size, SizeRule, named
from weightcached.loader.architectures.table import Architecture

QWEN2_ATTENTION = attention(qkv_bias=True)
# With attention_bias the output projection has one too, as in Transformers and SGLang; vLLM 0.32 drops it.
QWEN3_ATTENTION = attention(qkv_bias="attention_bias", output_bias="attention_bias", head_norms=True)

EXPERTS = (
    Replicated("mlp.gate.weight", ("experts", "hidden")),
    Experts("mlp.experts.routed_experts", source="mlp.experts"),
)
SIZES: Mapping[Size, SizeRule] = {
    "experts": named("num_experts", "num_local_experts"),
    "expert_intermediate": named("moe_intermediate_size"),
}


def _shares_an_expert(model: ModelShape, _: int) -> bool:
    return model.count("shared_expert_intermediate_size") > 0


QWEN2 = Architecture(
    names=("Qwen2ForCausalLM",),
    rows=decoder(QWEN2_ATTENTION, gated_mlp("mlp")),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 32},
)

QWEN3 = Architecture(
    names=("Qwen3ForCausalLM",),
    rows=decoder(QWEN3_ATTENTION, gated_mlp("mlp")),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
)

QWEN2_MOE = Architecture(
    names=("Qwen2MoeForCausalLM",),
    rows=decoder(
        QWEN2_ATTENTION,
        (
            Where(
                every_nth,
                (
                    *EXPERTS,
                    Replicated("mlp.shared_expert_gate.weight", (1, "hidden")),
                    Where(_shares_an_expert, gated_mlp("mlp.shared_expert", intermediate="shared_intermediate")),
                ),
            ),
            Where(without(every_nth), gated_mlp("mlp")),
        ),
    ),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 16, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 5632},
    sizes={**SIZES, "shared_intermediate": named("shared_expert_intermediate_size")},
    ends_on_all_stages=True,
)

QWEN3_MOE = Architecture(
    names=("Qwen3MoeForCausalLM",),
    rows=decoder(QWEN3_ATTENTION, (Where(every_nth, EXPERTS), Where(without(every_nth), gated_mlp("mlp")))),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 4, "decoder_sparse_step": 1},
    sizes=SIZES,
    ends_on_all_stages=True,
)
