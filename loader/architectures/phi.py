"""Phi-3: Llama's layers, with query, key and value in one tensor on disk, and gate and up in another."""

from __future__ import annotations

from weightcached.loader.architectures.llama import ROTARY, TIED_HEAD, decoder
from weightcached.loader.architectures.rows import Column, Qkv, RowParallel
from weightcached.loader.architectures.table import Architecture

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"

PHI3 = Architecture(
    names=("Phi3ForCausalLM",),
    rows=decoder(
        (
            Qkv(QKV, query=QKV, key=QKV, value=QKV, inputs="hidden"),
            RowParallel("self_attn.o_proj", outputs="hidden", inputs="queries"),
        ),
        (
            Column(GATE_UP, parts=(GATE_UP, GATE_UP), outputs="intermediate", inputs="hidden"),
            RowParallel("mlp.down_proj", outputs="hidden", inputs="intermediate"),
        ),
    ),
    ignored=(*ROTARY, TIED_HEAD),
)
