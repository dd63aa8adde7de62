"""Tables of Llama and its kin against plain torch: each generation's config.json, as Transformers writes it."""

from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.execution import load
from tests.support.plain import decoder, require_every_rank, tensors_of
from tests.support.written import write

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 200,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
GENERATIONS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Llama 2": ("LlamaForCausalLM", 8, {}),
    "Llama 3": ("LlamaForCausalLM", 2, {"num_key_value_heads": 2}),
    "Llama 3.1": ("LlamaForCausalLM", 2, {"num_key_value_heads": 2, "rope_parameters": SCALED}),
    "Llama 3.2": ("LlamaForCausalLM", 2, {"num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 16}),
    "Llama with biases": ("LlamaForCausalLM", 4, {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "Mistral": ("MistralForCausalLM", 8, {}),
    "Mistral with a head size": ("MistralForCausalLM", 2, {"num_key_value_heads": 2, "head_dim": 16}),
    "Qwen2": ("Qwen2ForCausalLM", 2, {"num_key_value_heads": 2}),
    "Qwen3": ("Qwen3ForCausalLM", 2, {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_rank(tmp_path, generation, size):
    architecture, kv_heads, more = GENERATIONS[generation]
    directory = write(tmp_path, architecture, {**SIZES, **more})
    aliases = TIED if more.get("tie_word_embeddings") else {}
    require_every_rank(directory, decoder(kv_heads=kv_heads), size=size, aliases=aliases)


def test_rotary_tables_in_old_files_are_left_out(tmp_path):
    directory = write(tmp_path, "LlamaForCausalLM", SIZES)
    tensors = tensors_of(directory)
    tables = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(2) for layer in range(2)}
    save_file({**tensors, **tables}, directory / "model.safetensors")
    require_every_rank(directory, decoder(kv_heads=8), size=2)
    accounting = load(directory, layout="fused", tp_size=1, tp_rank=0).prepared.plan.accounting
    assert accounting.ignored.keys() == tables.keys()
