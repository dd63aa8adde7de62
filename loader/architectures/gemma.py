"""Gemma, Gemma 2 (norms after attention and feed-forward network, too) and Gemma 3 (and over query and key heads).

The output head is always the embedding; ``config.json`` says so by not mentioning it.
"""

from __future__ import annotations

from weightcached.loader.architectures.llama import (
    ROTARY,
    TIED_HEAD,
    attention,
    decoder,
    decoder_of,
    gated_mlp,
    headless,
    norm,
)
from weightcached.loader.architectures.rows import Row
from weightcached.loader.architectures.table import Architecture


def _layer(attention: tuple[Row, ...]) -> tuple[Row, ...]:
    return (
        norm("input_layernorm"),
        *attention,
        norm("post_attention_layernorm"),
        norm("pre_feedforward_layernorm"),
        *gated_mlp("mlp"),
        norm("post_feedforward_layernorm"),
    )


GEMMA = Architecture(
    names=("GemmaForCausalLM",),
    rows=decoder(attention(), gated_mlp("mlp")),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    ends_on_all_stages=True,
)

GEMMA2 = Architecture(
    names=("Gemma2ForCausalLM",),
    # Engines take the embedding for the output head without giving it a second name.
    rows=headless(_layer(attention(qkv_bias="attention_bias", output_bias="attention_bias"))),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    ends_on_all_stages=True,
)

GEMMA3 = Architecture(
    names=("Gemma3ForCausalLM",),
    rows=decoder_of(_layer(attention(qkv_bias="attention_bias", output_bias="attention_bias", head_norms=True))),
    ignored=(*ROTARY, TIED_HEAD),
    defaults=GEMMA2.defaults,
    nested="text_config",
    ends_on_all_stages=True,
)
