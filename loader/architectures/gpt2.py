"""GPT-2: linear layers that are ``[in, out]`` on disk, query, key and value in one of them; learned positions."""

from __future__ import annotations

from weightcached.loader.architectures.blocks import Block
from weightcached.loader.architectures.rows import Column, Qkv, Replicated, RowParallel, Vocabulary, layer_norm
from weightcached.loader.architectures.shape import PLAIN_HEADS, named
from weightcached.loader.architectures.table import Architecture, Ignore

LAYER = (
    *layer_norm("ln_1"),
    Qkv(
        "attn.c_attn",
        query="attn.c_attn",
        key="attn.c_attn",
        value="attn.c_attn",
        inputs="hidden",
        bias=True,
        transposed=True,
    ),
    RowParallel("attn.c_proj", outputs="hidden", inputs="hidden", bias=True, transposed=True),
    *layer_norm("ln_2"),
    Column("mlp.c_fc", parts=("mlp.c_fc",), outputs="intermediate", inputs="hidden", bias=True, transposed=True),
    RowParallel("mlp.c_proj", outputs="hidden", inputs="intermediate", bias=True, transposed=True),
)

GPT2 = Architecture(
    names=("GPT2LMHeadModel",),
    rows=(
        Vocabulary("transformer.wte"),
        Replicated("transformer.wpe.weight", ("position_table", "hidden")),
        Block("transformer.h", count="layers", rows=LAYER),
        *layer_norm("transformer.ln_f"),
        Vocabulary("lm_head", tied_to="transformer.wte"),
    ),
    ignored=(
        Ignore("transformer.h.*.attn.bias", "the causal mask: the engine makes its own"),
        Ignore("transformer.h.*.attn.masked_bias", "a constant of the causal mask: the engine makes its own"),
        Ignore("lm_head.*", "tied: the output head is transformer.wte.weight", switch="tie_word_embeddings"),
    ),
    defaults={"tie_word_embeddings": True},
    sizes={
        **PLAIN_HEADS,
        "hidden": named("n_embd"),
        "intermediate": named("n_inner", otherwise=lambda model: 4 * model.size("hidden")),
        "layers": named("n_layer"),
        "heads": named("n_head"),
        "position_table": named("n_positions"),
    },
    spellings=({"transformer.": "transformer."}, {"transformer.": ""}),
    ends_on_all_stages=True,
)
