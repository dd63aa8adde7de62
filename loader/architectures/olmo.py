"""OLMo 2: norms after attention and feed-forward network only, and over all query heads and all key heads at once."""

from __future__ import annotations

from weightcached.loader.architectures.llama import ROTARY, TIED_HEAD, attention, decoder_of, gated_mlp, norm
from weightcached.loader.architectures.rows import Replicated
from weightcached.loader.architectures.table import Architecture

OLMO2 = Architecture(
    names=("Olmo2ForCausalLM",),
    rows=decoder_of(
        (
            *attention(),
            # Whole on every rank: the norm is over what all ranks have of a token, so the engine gathers it first.
            Replicated("self_attn.q_norm.weight", ("queries",)),
            Replicated("self_attn.k_norm.weight", ("keys",)),
            norm("post_attention_layernorm"),
            *gated_mlp("mlp"),
            norm("post_feedforward_layernorm"),
        )
    ),
    ignored=(*ROTARY, TIED_HEAD),
)
