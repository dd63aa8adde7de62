"""Llama and Mistral: grouped-query attention, gated MLP; biases only where Llama's ``config.json`` switches them on."""

from __future__ import annotations

from weightcached.loader.architectures.blocks import Block, Where
from weightcached.loader.architectures.rows import Column, Qkv, Replicated, Row, RowParallel, Switch, Vocabulary
from weightcached.loader.architectures.shape import Size
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


def gated_mlp(at: str, *, intermediate: Size = "intermediate", bias: Switch = False) -> tuple[Row, ...]:
    """A gated feed-forward network under the name ``at``."""
    return (
        Column(
            f"{at}.gate_up_proj",
            parts=(f"{at}.gate_proj", f"{at}.up_proj"),
            outputs=intermediate,
            inputs="hidden",
            bias=bias,
        ),
        RowParallel(f"{at}.down_proj", outputs="hidden", inputs=intermediate, bias=bias),
    )


def attention(*, qkv_bias: Switch = False, output_bias: Switch = False, head_norms: bool = False) -> tuple[Row, ...]:
    """Grouped-query attention. ``head_norms``: a norm over each query and each key head."""
    norms = (
        Replicated("self_attn.q_norm.weight", ("head",)),
        Replicated("self_attn.k_norm.weight", ("head",)),
    )
    return (
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
    )


def norm(name: str) -> Row:
    """A norm over the hidden size."""
    return Replicated(f"{name}.weight", ("hidden",))


def decoder(attention: tuple[Row, ...], feed_forward: tuple[Row | Where, ...]) -> tuple[Row, ...]:
    """The rows of a decoder of this family: each layer normalizes what attention and feed-forward network take in."""
    return decoder_of((norm("input_layernorm"), *attention, norm("post_attention_layernorm"), *feed_forward))


def decoder_of(layer: tuple[Row | Where, ...]) -> tuple[Row, ...]:
    """The rows of a decoder made of such layers, and of its output head."""
    return (*headless(layer), Vocabulary("lm_head", tied_to="model.embed_tokens"))


def headless(layer: tuple[Row | Where, ...]) -> tuple[Row, ...]:
    """The same without the head."""
    return (
        Vocabulary("model.embed_tokens"),
        Block("model.layers", count="layers", rows=layer),
        norm("model.norm"),
    )


LLAMA = Architecture(
    names=("LlamaForCausalLM",),
    rows=decoder(attention(qkv_bias="attention_bias", output_bias="attention_bias"), gated_mlp("mlp", bias="mlp_bias")),
    ignored=(*ROTARY, TIED_HEAD),
)

MISTRAL = Architecture(
    names=("MistralForCausalLM",),
    rows=decoder(attention(), gated_mlp("mlp")),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 8},
)
