"""MXFP4: GPT-OSS's stacked experts in blocks of 32, cut by whole blocks; attention and router stay plain."""

import pytest

from tests.support import expert_models
from tests.support.execution import load
from tests.support.quantized import bits, without, write
from tests.support.referenced import require_as_the_reference
from weightcached.protocol.errors import MissingTensor, ShapeMismatch, UnsupportedModel

AT = "model.layers.0.mlp.experts"
HELD = f"{AT}.routed_experts"
EXPERTS = 5
NAMES = {"w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias"}


@pytest.fixture
def checkpoint(tmp_path):
    """(directory, config, tensors): 128 inner inputs are four blocks, 64 hidden ones two."""
    config = expert_models.config_of("gpt_oss", hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    tensors = {}
    for name, shape in expert_models.shapes_of(config).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            tensors[f"{name}_blocks"] = bits(f"{name}_blocks", (experts, outputs, inputs // 32, 16), "U8")
            tensors[f"{name}_scales"] = bits(f"{name}_scales", (experts, outputs, inputs // 32), "U8")
        else:
            tensors[name] = bits(name, shape, "BF16")
    return write(tmp_path, tensors, config), config, tensors


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_that_share_every_expert(checkpoint, size):
    directory, _, _ = checkpoint
    for rank in range(size):
        held = require_as_the_reference(directory, tp_size=size, tp_rank=rank).rows
        assert {name.removeprefix(f"{HELD}.") for name in held if name.startswith(HELD)} == NAMES


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_ranks_that_hold_some_experts(checkpoint, placement):
    directory, _, _ = checkpoint
    for rank in range(2):
        require_as_the_reference(directory, ep_size=2, ep_rank=rank, expert_placement=placement)


def test_other_stages_blocks_are_ignored_with_the_reason(checkpoint, tmp_path):
    _, config, tensors = checkpoint
    second = {name.replace("layers.0", "layers.1"): tensor for name, tensor in tensors.items()}
    directory = write(tmp_path / "two", tensors | second, {**config, "num_hidden_layers": 2})
    outcome = load(directory, layout="fused", tp_size=1, tp_rank=0, pp_size=2, pp_rank=1)
    ignored = outcome.prepared.plan.accounting.ignored
    assert {ignored[f"{AT}.{name}"] for name in ("down_proj_blocks", "gate_up_proj_scales", "down_proj_bias")} == {
        "of another pipeline stage"
    }


def test_a_share_that_is_not_whole_blocks_is_refused(checkpoint):
    """An engine rounds up and pads: 128 inputs on 8 ranks would be 32 on four of them, and none on the others."""
    directory, _, _ = checkpoint
    with pytest.raises(UnsupportedModel, match="not whole blocks of 32"):
        load(directory, layout="fused", tp_size=8, tp_rank=0)


@pytest.mark.parametrize("ending", ["blocks", "scales"])
def test_what_is_missing_or_of_another_shape_is_named(checkpoint, tmp_path, ending):
    _, config, tensors = checkpoint
    name = f"{AT}.down_proj_{ending}"
    with pytest.raises(MissingTensor) as missing:
        load(write(tmp_path / "a", without(tensors, name), config), layout="fused", tp_size=1, tp_rank=0)
    assert name in str(missing.value.expected)
    wrong = bits(name, (EXPERTS, 64, 3), "U8")
    with pytest.raises(ShapeMismatch, match=name):
        load(write(tmp_path / "b", {**tensors, name: wrong}, config), layout="fused", tp_size=1, tp_rank=0)
