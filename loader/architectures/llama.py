"""Llama and Mistral: grouped-query attention, gated MLP; biases only where Llama's ``config.json`` switches them on."""

from __future__ import annotations

from weightcached.loader.architectures.rows import Block, Column, Qkv, Replicated, Row, RowParallel, Switch, Vocabulary
from weightcached.loader.architectures.table import Architecture, Ignore

ROTARY = tuple(
    Ignore(f"{where}.rotary_emb.{cache}", "a rotary table: the engine computes it from config.json")
    for where in ("model", "model.layers.*.self_attn")
    for cache in ("inv_freq", "cos_cached", "sin_cached")
)
TIED_HEAD = Ignore(
    "lm_head.*",
    "tied: the output head is model.embed_tokens.weight (tie_word_embeddings)",
    switch="tie_word_embeddings",
)


def decoder(
    *, qkv_bias: Switch = False, output_bias: Switch = False, mlp_bias: Switch = False, head_norms: bool = False
) -> tuple[Row, ...]:
    """The rows of a dense decoder of this family. ``head_norms``: a norm over each query and each key head."""
    norms = (
        Replicated("self_attn.q_norm.weight", ("head",)),
        Replicated("self_attn.k_norm.weight", ("head",)),
    )
    layer: tuple[Row, ...] = (
        Replicated("input_layernorm.weight", ("hidden",)),
        Qkv(
            "self_attn.qkv_proj",
            query="self_attn.q_proj",
            key="self_attn.k_proj",
            value="self_attn.v_proj",
            inputs="hidden",
            bias=qkv_bias,
        ),
        *(norms if head_norms else ()),
        RowParallel("self_attn.o_proj", outputs="hidden", inputs="queries", bias=output_bias),
        Replicated("post_attention_layernorm.weight", ("hidden",)),
        Column(
            "mlp.gate_up_proj",
            parts=("mlp.gate_proj", "mlp.up_proj"),
            outputs="intermediate",
            inputs="hidden",
            bias=mlp_bias,
        ),
        RowParallel("mlp.down_proj", outputs="hidden", inputs="intermediate", bias=mlp_bias),
    )
    return (
        Vocabulary("model.embed_tokens"),
        Block("model.layers", count="layers", rows=layer),
        Replicated("model.norm.weight", ("hidden",)),
        Vocabulary("lm_head", tied_to="model.embed_tokens"),
    )


LLAMA = Architecture(
    names=("LlamaForCausalLM",),
    rows=decoder(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    ignored=(*ROTARY, TIED_HEAD),
)

MISTRAL = Architecture(
    names=("MistralForCausalLM",),
    rows=decoder(),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 8},
)
