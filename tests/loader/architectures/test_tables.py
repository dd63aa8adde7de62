"""What holds for every table, those that will be added too: nothing of a checkpoint is lost, and ranks agree."""

import numpy as np
import pytest

from tests.support import naive
from tests.support.plans import headers, plan
from weightcached.loader.architectures import ARCHITECTURES, TABLES
from weightcached.loader.architectures.ranks import Rank

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
    # GPT-2
    "n_embd": 32,
    "n_head": 8,
    "n_layer": 3,
    "n_positions": 40,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    # latent attention
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
"""A config.json with the keys of all families."""


def model_of(architecture):
    return {**SMALL, "architectures": [architecture]}


def tensors_of(architecture):
    """What a checkpoint has by the table itself: all that one rank alone would take."""
    table = ARCHITECTURES[architecture]
    wanted = table.wanted(table.shape_of(model_of(architecture)), Rank(1, 0))
    return headers({part.source: part.shape for one in wanted for part in one.parts})


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_ranks_together_take_every_element(architecture, size):
    tensors = tensors_of(architecture)
    taken = {name: np.zeros(header.shape, bool) for name, header in tensors.items()}
    for rank in range(size):
        for parameter in plan(model_of(architecture), tensors, tp_size=size, tp_rank=rank).parameters:
            for copy in parameter.copies:
                taken[copy.tensor.name][naive.slices(copy.source)] = True
    assert [name for name, elements in taken.items() if not elements.all()] == []


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_names_shapes_and_order_do_not_depend_on_the_rank(architecture):
    tensors = tensors_of(architecture)
    made = [plan(model_of(architecture), tensors, tp_size=4, tp_rank=rank).parameters for rank in range(4)]
    first, *others = [[(p.name, p.shape, p.dtype, p.alias_of, p.part_kind) for p in each] for each in made]
    assert all(other == first for other in others)


def test_no_two_tables_have_one_name():
    assert len(ARCHITECTURES) == sum(len(table.names) for table in TABLES)
