"""OLMo 2's table against plain torch: norms over all heads at once are whole on every rank."""

import pytest

from tests.support.plain import decoder, require_every_rank
from tests.support.written import write


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_rank_of_olmo2(tmp_path, size):
    directory = write(
        tmp_path,
        "Olmo2ForCausalLM",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 200,
            "pad_token_id": 0,
        },
    )
    require_every_rank(directory, decoder(kv_heads=2), size=size)
