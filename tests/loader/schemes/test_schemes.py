"""Checkpoints that are quantized already: every rank of every scheme against the naive reference."""

import re

import pytest
import torch

from tests.support.execution import load
from tests.support.quantized import (
    FUSED,
    Stored,
    bits,
    config_of,
    loaded,
    require_equal,
    tensors_of,
    without,
    write,
)
from tests.support.quantized_cases import CASES, CHANNEL, FP8, INT8, PACKED, compressed, gptq, weights
from tests.support.referenced import require_as_the_reference, require_every_rank_as_the_reference
from weightcached.protocol.errors import (
    CheckpointError,
    MissingTensor,
    ModelConfigError,
    ShapeMismatch,
    UnexpectedTensor,
    UnsupportedModel,
)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_its_share_of_every_tensor(tmp_path, case, size):
    quantization, scheme = CASES[case]
    config = config_of(quantization)
    directory = write(tmp_path, tensors_of(config, scheme), config)
    for rank in range(size):
        held = require_as_the_reference(directory, tp_size=size, tp_rank=rank).rows
        linear = {
            f"model.layers.{n}.{layer}.{one.suffix}" for n in (0, 1) for layer in FUSED for one in scheme if one.needed
        }
        assert {name for name in held if any(f".{layer}." in name for layer in FUSED)} == linear


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_that_is_missing_is_named(tmp_path, case):
    """Each of a part's tensors in turn: a scale that was dropped is never taken for one that is not needed."""
    quantization, scheme = CASES[case]
    config = config_of(quantization, num_hidden_layers=1)
    tensors = tensors_of(config, scheme)
    for stored in scheme:
        if not stored.needed:
            continue
        name = f"model.layers.0.mlp.up_proj.{stored.suffix}"
        with pytest.raises(MissingTensor) as caught:
            load(write(tmp_path, without(tensors, name), config), layout="fused", tp_size=1, tp_rank=0)
        assert name in str(caught.value.expected)


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_of_another_shape_is_named(tmp_path, case):
    quantization, scheme = CASES[case]
    config = config_of(quantization, num_hidden_layers=1)
    tensors = tensors_of(config, scheme)
    for stored in scheme:
        if not stored.needed:
            continue
        name = f"model.layers.0.mlp.up_proj.{stored.suffix}"
        wrong = bits(name, (*tensors[name].shape[:-1], 3), stored.code)
        with pytest.raises(ShapeMismatch) as caught:
            load(write(tmp_path, {**tensors, name: wrong}, config), layout="fused", tp_size=1, tp_rank=0)
        assert name in caught.value.message


def test_a_scale_that_no_scheme_has_is_named(tmp_path):
    quantization, scheme = CASES["fp8, one scale a tensor"]
    config = config_of(quantization)
    extra = "model.layers.1.mlp.down_proj.input_scale"
    tensors = {**tensors_of(config, scheme), extra: bits(extra, (), "F32")}
    with pytest.raises(UnexpectedTensor) as caught:
        load(write(tmp_path, tensors, config), layout="fused", tp_size=1, tp_rank=0)
    assert extra in str(caught.value.found)


def test_what_is_left_out_is_accounted_for(tmp_path):
    quantization, scheme = CASES["gptq"]
    config = config_of(quantization, num_hidden_layers=1)
    tensors = tensors_of(config, scheme)
    tensors["model.layers.0.self_attn.q_proj.bias"] = bits("bias", (64,), "F16")
    outcome = load(write(tmp_path, tensors, config), layout="fused", tp_size=1, tp_rank=0)
    ignored = outcome.prepared.plan.accounting.ignored
    assert len(ignored) == 8
    assert "writes a bias" in ignored["model.layers.0.self_attn.q_proj.bias"]
    assert "group_size" in ignored["model.layers.0.mlp.down_proj.g_idx"]


def test_blocks_may_be_short_where_the_matrix_ends(tmp_path):
    """Hidden size 36: the last block of q, k, v, gate and up has four columns, that of o and down four rows."""
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}
    scale = Stored("weight_scale_inv", "F32", lambda o, i: (-(-o // 8), -(-i // 8)), 0)
    config = config_of(quantization, hidden_size=36)
    tensors = tensors_of(config, (FP8, scale))
    assert tensors["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (8, 5)
    directory = write(tmp_path, tensors, config)
    for size in (1, 2):
        require_every_rank_as_the_reference(directory, size=size)


@pytest.mark.parametrize(
    ("case", "sizes", "size", "layer", "unit"),
    [
        # 16 rows of each of four ranks' key heads are half a block: by rounding up, rank 1 would get rank 2's scale.
        ("blocks of 32", {}, 4, "self_attn.q_proj", "block"),
        ("gate of 60 rows", {"intermediate_size": 60}, 1, "mlp.gate_proj", "block"),
        ("awq", {"intermediate_size": 80}, 4, "mlp.gate_proj", "packed integer"),
        ("gptq", {"intermediate_size": 32}, 4, "mlp.down_proj", "group"),
        ("int4, groups", {"intermediate_size": 32}, 4, "mlp.down_proj", "group"),
        ("compressed-tensors fp8, blocks", {"intermediate_size": 48}, 4, "mlp.gate_proj", "block"),
        ("int4, groups with zero points", {"head_dim": 4, "hidden_size": 64}, 2, "self_attn.k_proj", "packed integer"),
        ("int8 packed, groups", {"intermediate_size": 32}, 4, "mlp.down_proj", "group"),
    ],
)
def test_a_share_that_does_not_align_is_refused_on_every_rank(tmp_path, case, sizes, size, layer, unit):
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    inverse = Stored("weight_scale_inv", "F32", lambda o, i: (-(-o // 32), -(-i // 32)), 0)
    quantization, scheme = CASES.get(case, (blocks, (FP8, inverse)))
    config = config_of(quantization, **sizes)
    directory = write(tmp_path, tensors_of(config, scheme), config)
    for rank in range(size):
        with pytest.raises(UnsupportedModel, match=f"not whole {unit}s") as caught:
            load(directory, layout="fused", tp_size=size, tp_rank=rank)
        assert layer in caught.value.message
        assert "smaller TP size" in (caught.value.next_step or "")


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("fp8, one scale a tensor", {"modules_to_not_convert": ["lm_head", "mlp.down_proj"]}),
        ("fp8, one scale a tensor", {"ignored_layers": [f"model.layers.{n}.mlp.down_proj" for n in range(2)]}),
        ("int4, groups", {"ignore": ["lm_head", r"re:.*\.down_proj$"]}),
        ("awq", {"modules_to_not_convert": ["down_proj"]}),
        ("awq", {}),
        ("gptq", {}),
        ("gptq", {"dynamic": {r"-:.*\.down_proj": {}}}),
        ("gptq", {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                                                   ["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"]]}),
    ],
)  # fmt: skip
def test_modules_that_are_not_quantized_stay_plain(tmp_path, case, changes):
    """As the settings say; awq and gptq without a word about it as the files say."""
    quantization, scheme = CASES[case]
    config = config_of({**quantization, **changes})
    tensors = tensors_of(config, scheme, plain=["down_proj"])
    held = require_as_the_reference(write(tmp_path, tensors, config), tp_size=2, tp_rank=1).rows
    assert held["model.layers.1.mlp.down_proj.weight"].dtype == "bfloat16"
    assert f"model.layers.1.self_attn.qkv_proj.{scheme[-1].suffix if scheme[-1].needed else scheme[-2].suffix}" in held


def test_a_plain_module_that_settings_call_quantized_and_the_reverse(tmp_path):
    quantization, scheme = CASES["fp8, one scale a tensor"]
    config = config_of(quantization)
    directory = write(tmp_path / "a", tensors_of(config, scheme, plain=["down_proj"]), config)
    with pytest.raises(MissingTensor, match="2 of"):
        load(directory, layout="fused", tp_size=1, tp_rank=0)
    config = config_of({**quantization, "modules_to_not_convert": ["down_proj"]})
    with pytest.raises(UnexpectedTensor) as caught:
        load(write(tmp_path / "b", tensors_of(config, scheme), config), layout="fused", tp_size=1, tp_rank=0)
    assert "down_proj.weight_scale" in str(caught.value.found)


def test_parts_of_a_fused_layer_that_are_not_quantized_alike(tmp_path):
    quantization, scheme = CASES["int4, groups"]
    config = config_of({**quantization, "ignore": ["k_proj"]})
    with pytest.raises(UnsupportedModel, match="cannot be fused") as caught:
        load(
            write(tmp_path, tensors_of(config, scheme, plain=["k_proj"]), config),
            layout="fused",
            tp_size=1,
            tp_rank=0,
        )
    assert "model.layers.0.self_attn.k_proj: plain" in str(caught.value.found)


def test_groups_of_modules_with_schemes_of_their_own(tmp_path):
    """A group that names modules comes before one that names the class, whatever their order."""
    quantization, _ = CASES["int8, channels"]
    named = {
        "targets": [r"re:.*down_proj"],
        "weights": weights("int", 4, "group", group_size=16),
        "format": "pack-quantized",
    }
    quantization = {**quantization, "config_groups": {**quantization["config_groups"], "group_1": named}}
    config = config_of(quantization, num_hidden_layers=1)
    mixed = tensors_of(config, (INT8, CHANNEL))
    packed = tensors_of(config, PACKED)
    tensors = {name: tensor for name, tensor in mixed.items() if "down_proj" not in name}
    tensors |= {name: tensor for name, tensor in packed.items() if "down_proj" in name}
    held = require_as_the_reference(write(tmp_path, tensors, config), tp_size=2, tp_rank=1).rows
    for layer, scheme in (("down_proj", PACKED), ("gate_up_proj", (INT8, CHANNEL))):
        assert {f"model.layers.0.mlp.{layer}.{one.suffix}" for one in scheme} <= held.keys()


def test_scales_take_the_dtype_that_is_asked_for_and_integers_stay(tmp_path):
    quantization, scheme = CASES["awq"]
    config = config_of(quantization, num_hidden_layers=1)
    tensors = tensors_of(config, scheme)
    outcome = load(write(tmp_path, tensors, config), layout="fused", tp_size=1, tp_rank=0, dtype="bfloat16")
    got, name = loaded(outcome), "model.layers.0.mlp.down_proj"
    require_equal(got[f"{name}.scales"], tensors[f"{name}.scales"].to(torch.bfloat16), "scales")
    require_equal(got[f"{name}.qweight"], tensors[f"{name}.qweight"], "qweight")


def test_nothing_is_quantized_twice(tmp_path):
    quantization, scheme = CASES["gptq"]
    config = config_of(quantization)
    with pytest.raises(UnsupportedModel, match="quantized already"):
        load(
            write(tmp_path, tensors_of(config, scheme), config),
            layout="fused",
            tp_size=1,
            tp_rank=0,
            quantization="fp8",
        )


@pytest.mark.parametrize(
    ("quantization", "error", "named"),
    [
        ({"quant_method": "gguf"}, UnsupportedModel, "gguf"),
        ({}, UnsupportedModel, "quantized with"),
        (["fp8"], ModelConfigError, "quantization_config is unusable"),
        ({"quant_method": "fp8", "activation_scheme": "magic"}, UnsupportedModel, "activation_scheme"),
        ({**CASES["fp8, blocks"][0], "weight_block_size": [128]}, ModelConfigError, "weight_block_size"),
        ({**CASES["fp8, blocks"][0], "activation_scheme": "static"}, UnsupportedModel, "activation_scheme"),
        ({**CASES["fp8, blocks"][0], "ignored_layers": 7}, ModelConfigError, "ignored_layers"),
        ({**CASES["awq"][0], "version": "gemv"}, UnsupportedModel, "version"),
        ({**CASES["awq"][0], "bits": 8}, UnsupportedModel, "bits"),
        (gptq(bits=3), UnsupportedModel, "bits"),
        (gptq(group_size=0), ModelConfigError, "group_size"),
        (gptq(desc_act="yes"), ModelConfigError, "desc_act"),
        (gptq(checkpoint_format="marlin"), UnsupportedModel, "checkpoint_format"),
        (gptq(dynamic={"+:*": {}}), ModelConfigError, "regular expression"),
        (compressed("nvfp4-pack-quantized", weights("float", 4, "tensor_group")), UnsupportedModel, "group_0"),
        (compressed("pack-quantized", weights("int", 4, "tensor")), UnsupportedModel, "weights.strategy"),
        (compressed("int-quantized", weights("int", 8, "channel", symmetric=False)), UnsupportedModel, "symmetric"),
        (compressed("pack-quantized", weights("int", 3, "channel")), UnsupportedModel, "num_bits"),
        ({**CASES["int8, channels"][0], "sparsity_config": {"format": "sparse"}}, UnsupportedModel, "sparsity_config"),
    ],
    ids=str,
)
def test_settings_that_are_not_supported_are_named_with_what_is(tmp_path, quantization, error, named):
    config = {**config_of({}), "quantization_config": quantization}
    with pytest.raises(error, match=named) as caught:
        load(write(tmp_path, tensors_of(config, ()), config), layout="fused", tp_size=1, tp_rank=0)
    if error is UnsupportedModel:
        assert caught.value.expected


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("fp8, one scale a tensor", "model.layers.0.mlp.up_proj.weight_scale"),
        ("fp8, static inputs", "model.layers.0.self_attn.v_proj.input_scale"),
        ("fp8, blocks", "model.layers.0.self_attn.k_proj.weight_scale_inv"),
        ("fp8, channels in bfloat16", "model.layers.0.mlp.down_proj.weight_scale"),
        ("awq", "model.layers.0.self_attn.q_proj.scales"),
        ("int4, groups", "model.layers.0.mlp.gate_proj.weight_scale"),
        ("fp8, one scale a tensor", "model.layers.0.self_attn.k_scale"),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path, case, name, bad):
    quantization, scheme = CASES[case]
    config = config_of(quantization, num_hidden_layers=1)
    tensors = {"model.layers.0.self_attn.k_scale": torch.ones(())} if name.endswith("k_scale") else {}
    tensors |= tensors_of(config, scheme)
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[-1] = bad
    with pytest.raises(CheckpointError, match="not finite") as caught:
        load(write(tmp_path, tensors, config), layout="fused", tp_size=1, tp_rank=0)
    assert name in caught.value.message
    assert "model.safetensors" in caught.value.message


def test_a_scale_too_large_for_the_dtype_that_is_asked_for(tmp_path):
    quantization, scheme = CASES["int4, groups"]
    config = config_of(quantization, num_hidden_layers=1)
    tensors = tensors_of(config, scheme)
    name = "model.layers.0.mlp.down_proj.weight_scale"
    tensors[name] = tensors[name] * 1e6
    with pytest.raises(CheckpointError, match="not finite") as caught:
        load(write(tmp_path, tensors, config), layout="fused", tp_size=1, tp_rank=0, dtype="float16")
    assert caught.value.found == "inf as float16"


@pytest.mark.parametrize("case", ["fp8, static inputs", "fp8, blocks", "awq", "gptq, activation order", "int4, groups"])
def test_parts_that_are_one_tensor_on_disk_are_cut_each_on_its_own(tmp_path, case):
    """Phi-3: as Llama's, once its fused tensors are split by the sizes of the whole."""
    quantization, scheme = CASES[case]
    config = config_of(quantization, architecture="Phi3ForCausalLM", num_hidden_layers=1)
    apart, at = tensors_of(config, scheme), "model.layers.0"
    fused = {name: tensor for name, tensor in apart.items() if not re.search(r"\.(q|k|v|gate|up)_proj\.", name)}
    for layer in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        for stored in scheme:
            names = [f"{at}.{part}.{stored.suffix}" for part in FUSED[layer]]
            whole = apart[names[-1]] if stored.outputs is None else torch.cat([apart[n] for n in names], stored.outputs)
            fused[f"{at}.{layer}.{stored.suffix}"] = whole
    directory = write(tmp_path, fused, config)
    for size in (1, 2, 4):
        require_every_rank_as_the_reference(directory, size=size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_scale_of_parts_that_are_one_tensor_on_disk_is_each_part_s(tmp_path, size):
    """As many slots as the engine has, whether the parts' rows are read at once (alone, all are) or not."""
    quantization, scheme = CASES["fp8, static inputs"]
    config = config_of(quantization, architecture="Phi3ForCausalLM", num_hidden_layers=1, num_key_value_heads=1)
    apart, at = tensors_of(config, scheme), "model.layers.0"
    fused = {name: tensor for name, tensor in apart.items() if not re.search(r"\.(q|k|v|gate|up)_proj\.", name)}
    for layer, rows in (("self_attn.qkv_proj", 64 + 16 + 16), ("mlp.gate_up_proj", 2 * 64)):
        for stored in scheme:
            name = f"{at}.{layer}.{stored.suffix}"
            fused[name] = bits(name, stored.shape(rows, 64), stored.code)
    directory = write(tmp_path, fused, config)
    for rank in range(size):
        held = require_as_the_reference(directory, tp_size=size, tp_rank=rank).rows
        for layer, slots in (("self_attn.qkv_proj", 3), ("mlp.gate_up_proj", 2), ("mlp.down_proj", 1)):
            assert held[f"{at}.{layer}.weight_scale"].shape == held[f"{at}.{layer}.input_scale"].shape == (slots,)
