"""What plans say: names, kinds, casts, quantization, what is left out and why; and every refusal, with its way out.

The arithmetic of shards is tested in test_plan_properties.py and against the oracle.
"""

import dataclasses
import json
import math
import subprocess
import sys
import tracemalloc

import pytest

from tests.support.checkpoints import tiny_config, tiny_shapes
from tests.support.costs import costs_at_most
from tests.support.plans import FILE, cache_config, headers, parameters, plan
from tests.support.unprivileged import ROOT
from weightcached.loader.architectures import ARCHITECTURES
from weightcached.loader.boxes import Box
from weightcached.loader.plan import Cast, PlannedParameter, TensorHeader, make_plan
from weightcached.loader.quantizers import quantizer
from weightcached.protocol.errors import (
    CheckpointChanged,
    MissingTensor,
    ModelConfigError,
    ShapeMismatch,
    UnexpectedTensor,
    UnsupportedModel,
)
from weightcached.protocol.quantization import Quantization

LINEAR = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def test_order_and_kinds_of_a_rank_s_parameters():
    made = plan(tiny_config(num_hidden_layers=1), tp_size=2, tp_rank=1)
    assert [(p.name, p.part_kind) for p in made.parameters] == [
        ("model.embed_tokens.weight", "vocabulary"),
        ("model.layers.0.input_layernorm.weight", "replicated"),
        ("model.layers.0.self_attn.qkv_proj.weight", "column"),
        ("model.layers.0.self_attn.o_proj.weight", "row"),
        ("model.layers.0.post_attention_layernorm.weight", "replicated"),
        ("model.layers.0.mlp.gate_up_proj.weight", "column"),
        ("model.layers.0.mlp.down_proj.weight", "row"),
        ("model.norm.weight", "replicated"),
        ("lm_head.weight", "vocabulary"),
    ]
    assert {(p.kind, p.persistent, p.alias_of, p.produced_by) for p in made.parameters} == {
        ("parameter", True, None, None)
    }


def biases(model):
    return {p.name.removeprefix("model.layers.0.") for p in plan(model).parameters if p.name.endswith(".bias")}


QKV, OUT, MLP = "self_attn.qkv_proj.bias", "self_attn.o_proj.bias", {"mlp.gate_up_proj.bias", "mlp.down_proj.bias"}


@pytest.mark.parametrize(
    ("architecture", "attention_bias", "mlp_bias", "expected"),
    [
        ("LlamaForCausalLM", False, False, set()),
        ("LlamaForCausalLM", True, False, {QKV, OUT}),
        ("LlamaForCausalLM", False, True, MLP),
        ("LlamaForCausalLM", None, None, set()),
        ("MistralForCausalLM", True, True, set()),
        ("Qwen2ForCausalLM", None, None, {QKV}),
        ("Qwen2ForCausalLM", False, None, {QKV}),
        ("Qwen3ForCausalLM", False, None, set()),
        ("Qwen3ForCausalLM", True, None, {QKV, OUT}),
    ],
)
def test_biases_follow_table_and_config(architecture, attention_bias, mlp_bias, expected):
    model = tiny_config(
        architecture=architecture, attention_bias=attention_bias, mlp_bias=mlp_bias, num_hidden_layers=1
    )
    assert biases(model) == expected


@pytest.mark.parametrize("rank", range(4))
def test_a_row_parallel_bias_is_whole_on_every_rank(rank):
    made = parameters(plan(tiny_config(attention_bias=True), tp_size=4, tp_rank=rank))
    bias = made["model.layers.1.self_attn.o_proj.bias"]
    assert bias.part_kind == "replicated"
    assert [copy.source for copy in bias.copies] == [Box((0,), (32,))]


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_what_transformers_takes_for_keys_that_are_absent(architecture):
    """Head size and key/value heads, where config.json leaves them out: as the family's own config class has them."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")
    model = tiny_config(
        architecture=architecture, head_dim=None, num_key_value_heads=None, num_attention_heads=32, hidden_size=64
    )
    theirs = kind(**model)
    full = {**model, "head_dim": getattr(theirs, "head_dim", 2), "num_key_value_heads": theirs.num_key_value_heads}
    made = plan(model, headers(tiny_shapes(full)))
    assert [(p.name, p.shape) for p in made.parameters] == [(p.name, p.shape) for p in plan(full).parameters]


def test_a_null_head_size_is_hidden_over_heads():
    model = tiny_config(architecture="Qwen3ForCausalLM")
    model["head_dim"] = None
    assert parameters(plan(model))["model.layers.0.self_attn.q_norm.weight"].shape == (8,)


def test_a_vocabulary_so_small_that_ranks_have_only_padding():
    made = [parameters(plan(tiny_config(vocab_size=10), tp_size=4, tp_rank=rank)) for rank in range(4)]
    embeddings = [of_rank["model.embed_tokens.weight"] for of_rank in made]
    assert {e.shape for e in embeddings} == {(16, 32)}
    assert [len(e.copies) for e in embeddings] == [1, 0, 0, 0]
    assert embeddings[0].zeros == (Box((10, 0), (6, 32)),)
    assert [e.zeros for e in embeddings[1:]] == [(Box((0, 0), (16, 32)),)] * 3
    assert {e.dtype for e in embeddings} == {"bfloat16"}
    assert [e.source_dtype for e in embeddings] == ["bfloat16", None, None, None]


@pytest.mark.parametrize(("vocabulary", "works"), [(128256, True), (151936, False), (32000, False)])
def test_three_ranks_share_a_vocabulary_padded_to_64_and_no_other(vocabulary, works):
    model = tiny_config(num_attention_heads=6, num_key_value_heads=3, vocab_size=vocabulary)
    if works:
        assert parameters(plan(model, tp_size=3, tp_rank=2))["lm_head.weight"].shape == (42752, 32)
        return
    with pytest.raises(UnsupportedModel, match=f"vocabulary of {vocabulary}"):
        plan(model, tp_size=3, tp_rank=2)


# Tied embeddings


def test_tied_embeddings_are_one_parameter_with_two_names():
    made = plan(tiny_config(tie_word_embeddings=True), tp_size=2, tp_rank=1)
    head, embedding = parameters(made)["lm_head.weight"], parameters(made)["model.embed_tokens.weight"]
    assert head.alias_of == embedding.name
    assert (head.shape, head.dtype, head.copies, head.zeros) == (embedding.shape, embedding.dtype, (), ())
    assert made.parameters[-1] is head


def test_a_head_that_is_stored_though_tied_is_ignored_with_the_reason():
    model = tiny_config(tie_word_embeddings=True)
    tensors = headers(tiny_shapes({**model, "tie_word_embeddings": False}))
    made = plan(model, tensors)
    assert parameters(made)["lm_head.weight"].alias_of == "model.embed_tokens.weight"
    assert set(made.accounting.ignored) == {"lm_head.weight"}
    assert "tie_word_embeddings" in made.accounting.ignored["lm_head.weight"]


def test_a_head_that_is_missing_though_not_tied_is_an_error():
    tensors = headers(tiny_shapes(tiny_config(tie_word_embeddings=True)))
    with pytest.raises(MissingTensor, match=r"lm_head\.weight"):
        plan(tiny_config(), tensors)


# Accounting: missing, unexpected, ignored


@pytest.mark.parametrize("name", tiny_shapes(tiny_config(num_hidden_layers=1)))
def test_each_missing_tensor_is_named(name):
    model = tiny_config(num_hidden_layers=1)
    tensors = headers(tiny_shapes(model))
    del tensors[name]
    with pytest.raises(MissingTensor) as caught:
        plan(model, tensors)
    assert caught.value.expected == name


@pytest.mark.parametrize("name", tiny_shapes(tiny_config(architecture="Qwen2ForCausalLM", num_hidden_layers=1)))
@pytest.mark.parametrize("wrong", ["one more row", "one axis more"])
def test_each_tensor_of_another_shape_is_named(name, wrong):
    model = tiny_config(architecture="Qwen2ForCausalLM", num_hidden_layers=1)
    shapes = tiny_shapes(model)
    right = shapes[name]
    shapes[name] = (right[0] + 1, *right[1:]) if wrong == "one more row" else (1, *right)
    with pytest.raises(ShapeMismatch) as caught:
        plan(model, headers(shapes))
    assert name in caught.value.message
    assert (caught.value.expected, caught.value.found) == (list(right), list(shapes[name]))
    assert caught.value.where == FILE


EXTRA = {
    "model.layers.0.mlp.up_proj_extra.weight": False,
    "model.layers.0.mlp.gate_up_proj.weight": False,
    "model.layers.0.self_attn.q_proj.bias": False,
    "model.layers.0.self_attn.q_proj.weight_scale": False,
    "layers.0.mlp.up_proj.weight": False,
    "model.layers.00.mlp.up_proj.weight": False,
    "xmodel.norm.weight": False,
    "model.rotary_emb.inv_freq": True,
    "model.layers.0.self_attn.rotary_emb.inv_freq": True,
    "model.layers.1.self_attn.rotary_emb.cos_cached": True,
    "model.layers.1.self_attn.rotary_emb.sin_cached": True,
    "model.layers.0.self_attn.rotary_emb.inv_freq.weight": False,
    "model.layers.0.0.self_attn.rotary_emb.inv_freq": False,
    "model.layers.0.self_attn.my_rotary_emb.inv_freq": False,
    "model.layers.0.self_attn.rotary_emb.inv_freq_extra": False,
}


@pytest.mark.parametrize("name", EXTRA)
def test_an_extra_tensor_is_ignored_for_a_reason_or_an_error(name):
    tensors = headers({**tiny_shapes(tiny_config()), name: (4,)})
    if EXTRA[name]:
        accounting = plan(tensors=tensors).accounting
        assert set(accounting.ignored) == {name}
        assert "rotary" in accounting.ignored[name]
        assert name not in accounting.expected
        return
    with pytest.raises(UnexpectedTensor) as caught:
        plan(tensors=tensors)
    assert caught.value.found == name
    assert caught.value.where == FILE


def test_the_four_sets_of_a_whole_checkpoint():
    shapes = tiny_shapes(tiny_config())
    accounting = plan(tp_size=4, tp_rank=3).accounting
    assert accounting.expected == accounting.loaded == shapes.keys()
    assert not accounting.ignored
    assert not accounting.unexpected
    assert not accounting.missing


@pytest.mark.parametrize(("stated", "error"), [(1, UnexpectedTensor), (3, MissingTensor), (10**12, MissingTensor)])
def test_another_number_of_layers_than_config_json_says(stated, error):
    model = tiny_config(num_hidden_layers=stated)
    with pytest.raises(error) as caught:
        plan(model, headers(tiny_shapes(tiny_config())))
    assert f"{stated} layers" in str(caught.value)


def test_many_missing_names_are_counted_not_listed():
    with pytest.raises(MissingTensor, match="and 19 more") as caught:
        plan(tiny_config(num_hidden_layers=3), headers({"model.norm.weight": (32,)}))
    assert "29 of 30 expected" in caught.value.message
    assert len(str(caught.value)) < 1000


# Refusals


def refused(error, **options):
    with pytest.raises(error) as caught:
        plan(**options)
    return caught.value


def test_an_architecture_without_a_table():
    """What is known is listed, a way out that works at once is named, and a page that says how to add a table."""
    error = refused(UnsupportedModel, model=tiny_config(architecture="NewForCausalLM"), tensors={})
    assert "NewForCausalLM" in str(error)
    assert "--layout hf" in error.next_step
    assert "--engine vllm" in error.next_step
    assert "--engine transformers" in error.next_step
    assert "loader/architectures/README.md" in error.next_step
    assert (ROOT / "loader/architectures/README.md").is_file()
    assert set(error.expected.split(", ")) == set(ARCHITECTURES)
    assert plan(tiny_config(architecture="NewForCausalLM"), {}, layout="hf").parameters == ()


@pytest.mark.parametrize(("size", "what"), [(8, "4 query heads"), (3, "vocabulary of 100, padded to 128")])
def test_a_size_that_does_not_divide_says_which_would(size, what):
    error = refused(UnsupportedModel, tp_size=size, tp_rank=0)
    assert what in error.message
    assert error.expected == "TP size 1, 2, 4"
    assert error.found == f"TP size {size}"
    assert error.next_step is not None


@pytest.mark.parametrize(
    ("sizes", "size", "what"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "6 key/value heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "4 key/value heads"),
        ({"num_attention_heads": 9}, 2, "9 query heads"),
        ({"intermediate_size": 50}, 4, "intermediate size 50"),
        ({"num_attention_heads": 30, "num_key_value_heads": 5, "vocab_size": 640}, 3, "a vocabulary of 640"),
    ],
)
def test_each_dimension_that_does_not_divide_is_named(sizes, size, what):
    model = tiny_config(**{"vocab_size": 192, **sizes})
    assert what in refused(UnsupportedModel, model=model, tp_size=size).message


def test_layout_hf_has_one_rank():
    error = refused(UnsupportedModel, layout="hf", tp_size=2)
    assert "--layout fused" in error.next_step
    unknown = tiny_config(architecture="NewForCausalLM")
    error = refused(UnsupportedModel, model=unknown, tensors={}, layout="hf", tp_size=2)
    assert "--layout fused" not in error.next_step
    assert "NewForCausalLM" in error.next_step
    assert "loader/architectures/README.md" in error.next_step


def test_layout_hf_quantizes_nothing():
    assert "--layout fused" in refused(UnsupportedModel, layout="hf", quantization="fp8").next_step


def test_a_layout_or_revision_of_another_release():
    config = cache_config(tiny_config())
    for update in ({"layout_revision": config.layout_revision + 1}, {"layout": "engine", "engine": {"engine": "1"}}):
        with pytest.raises(UnsupportedModel, match="release"):
            make_plan({}, tiny_config(), config.model_copy(update=update))


def test_a_quantization_that_nobody_knows_here():
    model = tiny_config(quantization_config={"quant_method": "bitsandbytes"})
    error = refused(UnsupportedModel, model=model)
    assert "bitsandbytes" in error.message
    assert error.expected == "awq, compressed-tensors, fp8, gptq, mxfp4"
    assert "--layout hf" in error.next_step
    assert plan(model, layout="hf").parameters


def test_parts_of_different_dtypes():
    tensors = headers(tiny_shapes(tiny_config()))
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = dataclasses.replace(tensors[name], dtype="float16")
    error = refused(UnsupportedModel, tensors=tensors)
    assert f"{name}: float16" in error.found
    assert error.where == FILE


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "uint8"])
def test_weights_that_are_not_plain_floating_point(dtype):
    error = refused(UnsupportedModel, tensors=headers(tiny_shapes(tiny_config()), dtype))
    assert error.found == dtype
    assert "--layout hf" in error.next_step


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads"]
)
@pytest.mark.parametrize("value", [None, 0, -1, "32", 32.0, True])
def test_a_size_that_config_json_lacks_or_has_wrong(key, value):
    model = tiny_config()
    tensors = headers(tiny_shapes(model))
    model[key] = value
    assert key in refused(ModelConfigError, model=model, tensors=tensors).message


def test_heads_that_do_not_divide_hidden_size_need_a_head_size():
    model = tiny_config(hidden_size=33, head_dim=None)
    assert "head_dim" in refused(ModelConfigError, model=model, tensors={}).message


def test_a_switch_that_is_no_boolean():
    model = tiny_config(attention_bias="yes")
    assert "attention_bias" in refused(ModelConfigError, model=model, tensors={}).message


def test_config_json_changed_since_the_fingerprint():
    model = tiny_config()
    config = cache_config(model)
    changed = {**model, "intermediate_size": 64}
    with pytest.raises(CheckpointChanged) as caught:
        make_plan(headers(tiny_shapes(changed)), changed, config)
    assert caught.value.expected == "{'intermediate_size': 48}"
    assert caught.value.found == "{'intermediate_size': 64}"
    with pytest.raises(CheckpointChanged):
        make_plan({}, {key: value for key, value in model.items() if key != "vocab_size"}, config)
    assert make_plan(headers(tiny_shapes(model)), json.loads(json.dumps(model)), config).parameters


# Dtypes and quantization


@pytest.mark.parametrize("layout", ["hf", "fused"])
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("asked", ["auto", "bfloat16", "float16", "float32"])
def test_conversion_only_when_asked_for(layout, source, asked):
    made = plan(tensors=headers(tiny_shapes(tiny_config()), source), layout=layout, dtype=asked)
    stored = source if asked == "auto" else asked
    assert {p.dtype for p in made.parameters} == {stored}
    assert {p.source_dtype for p in made.parameters} == {source}
    assert {p.transform for p in made.parameters} == {None if stored == source else Cast(stored)}


def test_conversion_leaves_everything_but_plain_floating_point():
    tensors = {
        dtype: TensorHeader(dtype, dtype, (4,), FILE, 0, 4 * size)
        for dtype, size in {"int64": 8, "bool": 1, "uint8": 1, "float8_e4m3fn": 1, "complex64": 8, "float32": 4}.items()
    }
    made = parameters(plan(tiny_config(architecture="Any"), tensors, layout="hf", dtype="bfloat16"))
    assert {name: p.dtype for name, p in made.items()} == {name: name for name in tensors} | {"float32": "bfloat16"}


def test_a_tied_head_is_cast_with_its_embedding():
    made = parameters(plan(tiny_config(tie_word_embeddings=True), dtype="float32"))
    assert made["lm_head.weight"].dtype == made["model.embed_tokens.weight"].dtype == "float32"


QUANTIZATIONS = ("fp8", "fp8-tensor", "fp8-block=16x12", "int8", "int4=8", "int4-asym=8")


@pytest.mark.parametrize("asked", ["auto", "float16"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantization_takes_the_linear_weights_and_nothing_else(quantization, asked):
    model = tiny_config(architecture="Qwen2ForCausalLM", intermediate_size=64)
    plain = parameters(plan(model, tp_size=2, tp_rank=1, dtype=asked))
    made = plan(model, tp_size=2, tp_rank=1, quantization=quantization, dtype=asked)
    linear = {f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in LINEAR}
    expected = []
    for name, parameter in plain.items():
        if name not in linear:
            expected.append(parameter)
            continue
        transform = quantizer(name, parameter.shape, Quantization.named(quantization), dtype=parameter.dtype)
        first, *others = transform.products
        weight = dataclasses.replace(parameter, name=first.name, shape=first.shape, dtype=first.dtype)
        expected.append(dataclasses.replace(weight, source_dtype="bfloat16", transform=transform))
        expected += [
            PlannedParameter(
                one.name, one.shape, one.dtype, None, (), produced_by=first.name, part_kind=parameter.part_kind
            )
            for one in others
        ]
    assert list(made.parameters) == expected
    assert made.accounting == plan(model, tp_size=2, tp_rank=1, dtype=asked).accounting


def test_groups_that_a_shard_would_cut_are_refused():
    error = refused(UnsupportedModel, quantization="int4=16", tp_size=2, tp_rank=0)  # down_proj: 24 of 48 inputs
    assert "mlp.down_proj.weight" in error.message
    assert "24 inputs" in error.found
    assert "int4=8" in error.next_step
    plan(tiny_config(), quantization="int4=16")


# Layout hf


def test_layout_hf_is_every_tensor_as_it_is_sorted_by_name():
    tensors = {
        name: TensorHeader(name, dtype, shape, FILE, 0, math.prod(shape) * 8)
        for name, dtype, shape in [("z", "int64", (2, 3)), ("a", "float64", ()), ("m", "int64", (0, 7))]
    }
    made = plan(tiny_config(architecture="Whatever"), tensors, layout="hf")
    assert [(p.name, p.dtype, p.shape, len(p.copies)) for p in made.parameters] == [
        ("a", "float64", (), 1),
        ("m", "int64", (0, 7), 0),
        ("z", "int64", (2, 3), 1),
    ]
    assert made.accounting.loaded == {"a", "m", "z"}


# Purity and speed


def test_planning_imports_neither_torch_nor_numpy():
    script = (
        "import sys, weightcached.loader.checkpoint, weightcached.loader.plan, weightcached.loader.layout;"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_plan_does_not_depend_on_the_order_of_the_files():
    tensors = headers(tiny_shapes(tiny_config()))
    backwards = dict(reversed(tensors.items()))
    for layout in ("hf", "fused"):
        assert plan(tensors=tensors, layout=layout) == plan(tensors=backwards, layout=layout)


@pytest.fixture(scope="module")
def huge():
    """A model of 100,000 tensors: (config.json, headers)."""
    model = tiny_config(num_hidden_layers=11_111)
    return model, headers(tiny_shapes(model))


@pytest.mark.parametrize("options", [{"layout": "hf"}, {"tp_size": 4, "quantization": "fp8"}], ids=["hf", "fused"])
def test_the_time_to_plan_grows_with_the_number_of_tensors_and_no_faster(huge, options):
    """Of processor time, from 10,000 to 100,000. What it takes on this machine: `make bench BENCH_ARGS=plan`."""
    model, tensors = huge
    assert len(tensors) >= 100_000
    tenth = tiny_config(num_hidden_layers=model["num_hidden_layers"] // 10)
    some = headers(tiny_shapes(tenth))
    assert costs_at_most(20, lambda: plan(model, tensors, **options), of=lambda: plan(tenth, some, **options))


def test_100_000_tensors_are_planned_within_200_mib(huge):
    model, tensors = huge
    tracemalloc.start()
    try:
        plan(model, tensors, tp_size=4, quantization="fp8")
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes <= 200 << 20
