"""Qwen2 (biases on query, key and value) and Qwen3 (norms over query and key heads, a head size of its own)."""

from __future__ import annotations

from weightcached.loader.architectures.llama import ROTARY, TIED_HEAD, decoder
from weightcached.loader.architectures.table import Architecture

QWEN2 = Architecture(
    names=("Qwen2ForCausalLM",),
    rows=decoder(qkv_bias=True),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 32},
)

QWEN3 = Architecture(
    names=("Qwen3ForCausalLM",),
    # With attention_bias the output projection has one too, as in Transformers and SGLang; vLLM 0.32 drops it.
    rows=decoder(qkv_bias="attention_bias", output_bias="attention_bias", head_norms=True),
    ignored=(*ROTARY, TIED_HEAD),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
)
