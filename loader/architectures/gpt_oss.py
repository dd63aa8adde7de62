"""GPT-OSS with unquantized experts: biases everywhere, a sink for each query head, experts stacked on disk."""

from __future__ import annotations

from weightcached.loader.architectures.blocks import Block
from weightcached.loader.architectures.experts import StackedExperts
from weightcached.loader.architectures.llama import ROTARY
from weightcached.loader.architectures.rows import PerHead, Qkv, Replicated, RowParallel, Vocabulary
from weightcached.loader.architectures.shape import named
from weightcached.loader.architectures.table import Architecture

LAYER = (
    Replicated("input_layernorm.weight", ("hidden",)),
    PerHead("attn.sinks", source="self_attn.sinks"),
    Qkv(
        "attn.qkv_proj",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        inputs="hidden",
        bias=True,
    ),
    RowParallel("attn.o_proj", source="self_attn.o_proj", outputs="hidden", inputs="queries", bias=True),
    Replicated("post_attention_layernorm.weight", ("hidden",)),
    Replicated("mlp.router.weight", ("experts", "hidden")),
    Replicated("mlp.router.bias", ("experts",)),
    StackedExperts("mlp.experts.routed_experts", source="mlp.experts"),
)

GPT_OSS = Architecture(
    names=("GptOssForCausalLM",),
    rows=(
        Vocabulary("model.embedding", source="model.embed_tokens"),
        Block("model.layers", count="layers", rows=LAYER),
        Replicated("model.norm.weight", ("hidden",)),
        Vocabulary("lm_head"),
    ),
    ignored=ROTARY,
    defaults={"num_key_value_heads": 8, "head_dim": 64},
    sizes={"experts": named("num_local_experts"), "expert_intermediate": named("intermediate_size")},
    ends_on_all_stages=True,
)
