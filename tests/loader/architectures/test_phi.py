"""Phi-3's table against plain torch: what is stacked whole in the file is cut part by part."""

import pytest

from tests.support.plain import Share, require_every_rank
from tests.support.written import write

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 200,
    "pad_token_id": 0,
}


def reference(tensors, rank: Share):
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("qkv_proj.weight"):
            made[name] = rank.qkv(*tensor.split([32, 16, 16]), kv_heads=4)
        elif name.endswith("gate_up_proj.weight"):
            made[name] = rank.rows(*tensor.split(48))
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            made[name] = rank.columns(tensor)
        elif "norm" in name:
            made[name] = tensor
        else:
            made[name] = rank.vocabulary(tensor)
    return made


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_rank_of_phi3(tmp_path, size):
    require_every_rank(write(tmp_path, "Phi3ForCausalLM", SIZES), reference, size=size)


def test_a_tied_head_is_the_embedding(tmp_path):
    directory = write(tmp_path, "Phi3ForCausalLM", {**SIZES, "tie_word_embeddings": True})
    require_every_rank(directory, reference, size=2, aliases={"lm_head.weight": "model.embed_tokens.weight"})
