"""Random models with experts on random numbers of ranks of every kind, counted: all ranks together take every
checkpoint element the right number of times, each rank accounts for every name, and shapes add up.
"""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import expert_models, naive
from tests.support.plans import headers, plan
from tests.support.spots import Spot
from weightcached.loader.fused import OTHER_EXPERTS, OTHER_STAGE


@st.composite
def placed_models(draw):
    """(config.json, all spots of one arrangement): sizes that the tensor-parallel ranks can share."""
    family = draw(st.sampled_from(list(expert_models.CONFIGS)))
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    replicas = draw(st.integers(0, 3))
    ep = tp * replicas if tp * replicas > 1 else 1
    experts = draw(st.integers(max(ep, 1), ep + 5))
    layers = draw(st.integers(1, 4))
    pp = draw(st.integers(1, layers))
    kv_heads = draw(st.sampled_from([n for n in range(1, 7) if tp % n == 0 or n % tp == 0]))
    sizes = {
        "hidden_size": draw(st.integers(1, 5)),
        "num_attention_heads": tp * draw(st.integers(1, 2)),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.integers(1, 3)),
        "intermediate_size": tp * draw(st.integers(1, 3)),
        "moe_intermediate_size": tp * draw(st.integers(1, 3)),
        "shared_expert_intermediate_size": tp * draw(st.integers(1, 2)),
        "num_hidden_layers": layers,
        "vocab_size": 64 * (3 if tp == 3 else 1) - draw(st.integers(0, 63)),
        "first_k_dense_replace": draw(st.integers(0, 2)),
        "moe_layer_freq": draw(st.integers(1, 2)),
        "mlp_only_layers": draw(st.lists(st.integers(0, 3), max_size=2)),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "q_lora_rank": draw(st.none() | st.integers(1, 3)),
        "tie_word_embeddings": draw(st.booleans()) and family != "gpt_oss",
        "num_experts": experts,
        "num_local_experts": experts,
        "n_routed_experts": experts,
    }
    own = {*expert_models.COMMON, *expert_models.CONFIGS[family]}
    config = expert_models.config_of(family, **{key: value for key, value in sizes.items() if key in own})
    in_turn = draw(st.booleans())
    devices = [Spot(tp, device % tp, ep, device if ep > 1 else 0, round_robin=in_turn) for device in range(max(tp, ep))]
    return config, [dataclasses.replace(spot, pp=pp, pp_rank=stage) for stage in range(pp) for spot in devices]


def times(name, config, spots):
    """On how many ranks each element of a checkpoint tensor lies."""
    tp, pp = spots[0].tp, spots[0].pp
    devices = len(spots) // pp
    everywhere = not config["model_type"].startswith("deepseek")
    if name == "model.embed_tokens.weight":
        stages = pp if everywhere else min(pp, 2 if config["tie_word_embeddings"] else 1)
        return stages * devices // tp
    if name == "lm_head.weight":
        return (pp if everywhere else 1) * devices // tp
    if name == "model.norm.weight":
        return (pp if everywhere else 1) * devices
    if ".experts." in name:
        return 1
    whole = ("norm", ".gate.", ".router.", "shared_expert_gate", "o_proj.bias", "q_a_proj", "kv_a_proj")
    if any(part in name for part in whole):
        return devices
    if ".k_proj." in name or ".v_proj." in name:
        return devices // tp * max(1, tp // config["num_key_value_heads"])
    return devices // tp


@settings(max_examples=50, deadline=None)
@given(placed_models())
def test_ranks_together_take_every_element_the_right_number_of_times(case):
    config, spots = case
    shapes = expert_models.shapes_of(config)
    taken = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for spot in spots:
        for parameter in plan(config, headers(shapes), **spot.options).parameters:
            written = np.zeros(parameter.shape, int)
            for copy in parameter.copies:
                taken[copy.tensor.name][naive.slices(copy.source)] += 1
                written[naive.slices(copy.destination)] += 1
            for box in parameter.zeros:
                written[naive.slices(box)] += 1
            assert (written == (0 if parameter.alias_of else 1)).all(), parameter.name
    for name, counts in taken.items():
        assert (counts == times(name, config, spots)).all(), name


@settings(max_examples=40, deadline=None)
@given(placed_models())
def test_every_rank_accounts_for_every_name_and_each_is_loaded_somewhere(case):
    config, spots = case
    shapes = expert_models.shapes_of(config)
    somewhere: set[str] = set()
    for spot in spots:
        accounting = plan(config, headers(shapes), **spot.options).accounting
        assert accounting.balanced
        assert accounting.loaded | accounting.ignored.keys() == shapes.keys()
        assert not accounting.loaded & accounting.ignored.keys()
        reasons = set(accounting.ignored.values())
        assert reasons <= ({OTHER_STAGE} if spot.pp > 1 else set()) | ({OTHER_EXPERTS} if spot.ep > 1 else set())
        assert all(".experts." in name for name, reason in accounting.ignored.items() if reason == OTHER_EXPERTS)
        somewhere |= accounting.loaded
    assert somewhere == shapes.keys()
