"""Quantized experts: each rank's stack of each tensor, whether ranks share every expert or hold some."""

import pytest

from tests.support.execution import load
from tests.support.quantized import bits, config_of, tensors_of, without, write
from tests.support.quantized_cases import CASES
from tests.support.referenced import require_as_the_reference
from weightcached.protocol.errors import MissingTensor, UnexpectedTensor, UnsupportedModel

SCHEMES = [
    "fp8, one scale a tensor",
    "fp8, static inputs",
    "fp8, blocks",
    "fp8, channels",
    "int8, channels",
    "int4, groups",
    "int4, groups with zero points",
    "awq",
    "gptq",
]
EXPERTS = 6


def mixtral(case, **overrides):
    quantization, scheme = CASES[case]
    config = config_of(quantization, architecture="MixtralForCausalLM", num_local_experts=EXPERTS, **overrides)
    return config, scheme, tensors_of(config, scheme)


@pytest.mark.parametrize("case", SCHEMES)
def test_ranks_that_share_every_expert(tmp_path, case):
    config, scheme, tensors = mixtral(case, num_hidden_layers=1)
    directory = write(tmp_path, tensors, config)
    for size in (1, 2, 4):
        for rank in range(size):
            outcome = require_as_the_reference(directory, tp_size=size, tp_rank=rank)
            experts = {name.rpartition("w13_")[2] for name in outcome.rows if ".w13_" in name}
            assert experts == {one.suffix for one in scheme if one.needed} - {"weight_shape"}


@pytest.mark.parametrize("case", SCHEMES)
def test_ranks_that_hold_some_experts_and_stages_that_hold_some_layers(tmp_path, case):
    """What other ranks hold is ignored with the reason, its scales and all."""
    config, scheme, tensors = mixtral(case)
    scale, zero_point = "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.k_zero_point"
    if "fp8" in case:
        tensors[scale] = bits(scale, (), "F32")
        tensors[zero_point] = bits(zero_point, (1,), "F32")
    directory = write(tmp_path, tensors, config)
    for rank in range(4):
        require_as_the_reference(directory, ep_size=4, ep_rank=rank)
    outcome = require_as_the_reference(directory, ep_size=2, ep_rank=1, pp_size=2, pp_rank=1)
    account = outcome.prepared.plan.accounting
    assert account.loaded | account.ignored.keys() == tensors.keys()
    assert "pipeline stage" in account.ignored[f"model.layers.0.block_sparse_moe.experts.5.w1.{scheme[-1].suffix}"]
    assert "expert-parallel" in account.ignored[f"model.layers.1.block_sparse_moe.experts.0.w2.{scheme[-1].suffix}"]
    if "fp8" in case:
        assert {account.ignored[scale], account.ignored[zero_point]} == {"of another pipeline stage"}


def test_a_share_of_experts_that_is_not_whole_blocks_is_refused_and_whole_experts_are_not(tmp_path):
    config, _, tensors = mixtral("fp8, blocks", num_hidden_layers=1, intermediate_size=48)
    directory = write(tmp_path, tensors, config)
    with pytest.raises(UnsupportedModel, match="not whole blocks of 16") as caught:
        load(directory, layout="fused", tp_size=2, tp_rank=1)
    assert "--ep-size" in (caught.value.next_step or "")
    require_as_the_reference(directory, ep_size=2, ep_rank=1)


def test_a_scale_of_one_expert_that_is_missing_is_named(tmp_path):
    config, _, tensors = mixtral("fp8, blocks", num_hidden_layers=1)
    name = "model.layers.0.block_sparse_moe.experts.3.w3.weight_scale_inv"
    with pytest.raises(MissingTensor) as caught:
        load(write(tmp_path, without(tensors, name), config), layout="fused", tp_size=1, tp_rank=0)
    assert name in str(caught.value.expected)


def test_a_scale_of_an_expert_that_there_is_not(tmp_path):
    config, _, tensors = mixtral("fp8, blocks", num_hidden_layers=1)
    name = "model.layers.0.block_sparse_moe.experts.6.w3.weight_scale_inv"
    tensors[name] = bits(name, (4, 8), "F32")
    options = {"ep_size": 2, "ep_rank": 0}
    with pytest.raises(UnexpectedTensor) as caught:
        load(write(tmp_path, tensors, config), layout="fused", tp_size=1, tp_rank=0, **options)
    assert name in str(caught.value.found)
