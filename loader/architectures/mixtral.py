"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from weightcached.loader.architectures.experts import Experts
from weightcached.loader.architectures.llama import ROTARY, TIED_HEAD, attention, decoder
from weightcached.loader.architectures.rows import Replicated
from weightcached.loader.architectures.shape import named
from weightcached.loader.architectures.table import Architecture

IN_STACKS = {
    ".block_sparse_moe.gate.weight": ".mlp.gate.weight",
    ".block_sparse_moe.experts.gate_up_proj": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.experts.down_proj": ".mlp.experts.down_proj",
}
"""How Transformers 5 calls them in memory, and in files where it is told to save what it has."""

MIXTRAL = Architecture(
    names=("MixtralForCausalLM",),
    rows=decoder(
        attention(),
        (
            Replicated("block_sparse_moe.gate.weight", ("experts", "hidden")),
            Experts(
                "block_sparse_moe.experts.routed_experts",
                source="block_sparse_moe.experts",
                gate="w1",
                up="w3",
                down="w2",
            ),
        ),
    ),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 8},
    sizes={
        "experts": named("num_local_experts", "num_experts"),
        "expert_intermediate": named("intermediate_size"),
    },
    spellings=(IN_STACKS, {}),
    ends_on_all_stages=True,
)
