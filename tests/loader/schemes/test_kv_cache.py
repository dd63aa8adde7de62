"""KV-cache scales: every spelling becomes the engine's parameter, twice is refused, none is dropped."""

from typing import Any

import pytest
import torch

from tests.support.execution import load
from tests.support.quantized import bits, config_of, loaded, require_equal, tensors_of, write
from tests.support.quantized_cases import CASES
from tests.support.referenced import require_as_the_reference
from weightcached.loader.schemes.kv_cache import kv_scales
from weightcached.loader.schemes.linear import KvScale
from weightcached.protocol.errors import ShapeMismatch, UnexpectedTensor, UnsupportedModel

AT = "model.layers.0.self_attn"
SPELLINGS = {
    f"{AT}.k_proj.k_scale": ["k"],
    f"{AT}.v_proj.v_scale": ["v"],
    f"{AT}.qkv_proj.v_scale": ["v"],
    f"{AT}.qkqkv_proj.k_scale": ["k"],
    f"{AT}.k_scale": ["k"],
    f"{AT}.attn.v_scale": ["v"],
    f"{AT}.q_scale": ["q"],
    f"{AT}.q.scale": ["q"],
    f"{AT}.v_cache.scale": ["v"],
    f"{AT}.k_proj.output_scale": ["k"],
    f"{AT}.q_proj.output_scale": ["q"],
    f"{AT}.prob_output_scale": ["prob"],
    f"{AT}.kv_scale": ["k", "v"],
}
FP8, SCHEME = CASES["fp8, static inputs"]
COMPRESSED, CHANNELS = CASES["fp8, channels"]


def outcome(directory, quantization: dict[str, Any], scheme, scales: dict[str, tuple[int, ...]], code="F32", rank=1):
    config = config_of(quantization)
    tensors = tensors_of(config, scheme) | {name: bits(name, shape, code) for name, shape in scales.items()}
    made = load(write(directory, tensors, config), layout="fused", tp_size=2, tp_rank=rank)
    return made, tensors


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_becomes_the_engine_s_parameter(tmp_path, spelling):
    made, tensors = outcome(tmp_path, FP8, SCHEME, {spelling: ()})
    got = {name: tensor for name, tensor in loaded(made).items() if ".attn." in name}
    assert got.keys() == {f"{AT}.attn.{kind}_scale" for kind in SPELLINGS[spelling]}
    for name, tensor in got.items():
        require_equal(tensor, tensors[spelling], name)
    require_as_the_reference(tmp_path, tp_size=2, tp_rank=1)


@pytest.mark.parametrize("stored", [(), (1,)])
@pytest.mark.parametrize(
    ("quantization", "scheme", "held", "dtype"),
    [
        (FP8, SCHEME, (), torch.float16),
        (COMPRESSED, CHANNELS, (1,), torch.float32),
    ],
    ids=["fp8", "compressed-tensors"],
)
def test_the_engine_s_shape_and_dtype_whatever_the_file_s(tmp_path, quantization, scheme, held, dtype, stored):
    """vLLM has a scalar of the model's dtype where the method is fp8, else one element of float32."""
    name = f"{AT}.k_scale"
    config = config_of(quantization)
    tensors = tensors_of(config, scheme) | {name: bits(name, stored, "BF16")}
    made = load(write(tmp_path, tensors, config), layout="fused", tp_size=1, tp_rank=0, dtype="float16")
    require_equal(loaded(made)[f"{AT}.attn.k_scale"], tensors[name].to(dtype).reshape(held), name)
    require_as_the_reference(tmp_path, dtype="float16")


def test_a_scale_of_another_shape_is_named(tmp_path):
    with pytest.raises(ShapeMismatch, match="k_scale") as caught:
        outcome(tmp_path, FP8, SCHEME, {f"{AT}.k_scale": (2,)})
    assert caught.value.expected == [[], [1]]


def test_two_spellings_of_one_scale_are_refused(tmp_path):
    with pytest.raises(UnexpectedTensor, match="two tensors") as caught:
        outcome(tmp_path, FP8, SCHEME, {f"{AT}.k_scale": (), f"{AT}.k_proj.k_scale": ()})
    assert "k_proj.k_scale" in str(caught.value.found)


def test_a_scale_of_no_layer_is_not_taken_for_one(tmp_path):
    with pytest.raises(UnexpectedTensor) as caught:
        outcome(tmp_path, FP8, SCHEME, {"model.layers.7.self_attn.k_scale": ()})
    assert "model.layers.7.self_attn.k_scale" in str(caught.value.found)


def test_engines_take_no_scales_beside_awq_so_they_are_not_dropped_in_silence(tmp_path):
    with pytest.raises(UnexpectedTensor, match="1 tensors"):
        outcome(tmp_path, *CASES["awq"], {f"{AT}.k_scale": ()})


def test_zero_points_of_symmetric_scales_are_left_out_with_the_reason(tmp_path):
    name = f"{AT}.v_zero_point"
    made, _ = outcome(tmp_path, COMPRESSED, CHANNELS, {name: (1,), f"{AT}.v_scale": (1,)})
    assert "symmetrically" in made.prepared.plan.accounting.ignored[name]


def test_scales_per_head_are_refused_by_name(tmp_path):
    scheme = {"type": "float", "num_bits": 8, "strategy": "attn_head", "symmetric": True}
    with pytest.raises(UnsupportedModel, match=r"kv_cache_scheme\.strategy"):
        outcome(tmp_path, {**COMPRESSED, "kv_cache_scheme": scheme}, CHANNELS, {})


def test_scales_come_in_the_order_of_the_engine_s_names_whatever_the_files():
    names = [f"model.layers.{n}.self_attn.{kind}_scale" for n in (1, 0) for kind in "vk"]
    attentions = {f"model.layers.{n}.self_attn": f"model.layers.{n}.attn" for n in (0, 1)}
    orders = [[one.name for one in kv_scales(some, attentions, KvScale((), None))] for some in (names, names[::-1])]
    assert orders[0] == orders[1] == [f"model.layers.{n}.attn.attn.{kind}_scale" for n in (0, 1) for kind in "kv"]
