"""Gemma's tables against plain torch, with config.json as Transformers writes it, or once wrote it."""

import json

import pytest

from tests.support.plain import decoder, require_every_rank
from tests.support.written import write

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 200,
}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
ALIASES = {"GemmaForCausalLM": TIED, "Gemma2ForCausalLM": {}, "Gemma3ForCausalLM": TIED}
"""The head's name, which Gemma 2 in engines has no need of."""


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("architecture", ["GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_every_rank(tmp_path, architecture, size):
    directory = write(tmp_path, architecture, SIZES)
    require_every_rank(directory, decoder(kv_heads=2), size=size, aliases=ALIASES[architecture])


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_biases_where_config_json_switches_them_on(tmp_path, architecture):
    directory = write(tmp_path, architecture, {**SIZES, "attention_bias": True})
    require_every_rank(directory, decoder(kv_heads=2), size=2, aliases=ALIASES[architecture])


def test_an_old_config_json_does_not_mention_that_the_head_is_tied(tmp_path):
    directory = write(tmp_path, "GemmaForCausalLM", SIZES)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "tie_word_embeddings"}))
    require_every_rank(directory, decoder(kv_heads=2), size=2, aliases=TIED)


def test_a_config_json_that_nests_the_text_model_s(tmp_path):
    directory = write(tmp_path, "Gemma3ForCausalLM", SIZES)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"architectures": config["architectures"], "text_config": config}))
    require_every_rank(directory, decoder(kv_heads=2), size=2, aliases=TIED)
