"""Models with experts, through the real executor: each rank's bytes are those of the naive reference.

Tensor, expert and pipeline parallelism, alone and together, for every family. The oracle's case is among those of
test_oracle.py and test_execute.py.
"""

import dataclasses
import math
import re
import tracemalloc

import pytest
import torch

from tests.support import expert_models
from tests.support.costs import costs_at_most
from tests.support.plans import cache_config, headers, parameters, plan
from tests.support.referenced import require_as_the_reference
from tests.support.spots import Spot
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.plan import Cast, make_plan
from weightcached.protocol.errors import MissingTensor, ModelConfigError, UnexpectedTensor, UnsupportedModel

FAMILIES = list(expert_models.CONFIGS)

SPOTS = [
    *(Spot(tp=size, tp_rank=rank) for size in (1, 2, 4, 8) for rank in range(size)),
    *(Spot(ep=size, ep_rank=rank) for size in (2, 3, 4) for rank in range(size)),
    *(Spot(ep=size, ep_rank=rank, round_robin=True) for size in (2, 3, 4) for rank in range(size)),
    *(Spot(tp=2, tp_rank=rank % 2, ep=4, ep_rank=rank) for rank in range(4)),
    *(Spot(pp=size, pp_rank=rank) for size in (2, 3) for rank in range(size)),
    *(Spot(tp=2, tp_rank=rank, ep=2, ep_rank=rank, pp=2, pp_rank=stage) for rank in range(2) for stage in range(2)),
]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """The directory of a small model of each family."""
    config = expert_models.config_of(request.param)
    return expert_models.write(tmp_path_factory.mktemp("experts") / request.param, config)


@pytest.mark.parametrize("spot", SPOTS, ids=str)
def test_each_rank_has_the_bytes_that_slicing_whole_tensors_gives(model, spot):
    require_as_the_reference(model, **spot.options)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_that_transformers_writes(tmp_path, family):
    """The small models of these tests are real ones, and their config.json as Transformers writes it will do, too."""
    transformers = pytest.importorskip("transformers")
    config = expert_models.config_of(family)
    arguments = {key: value for key, value in config.items() if key != "architectures"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**arguments))
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        shapes = {name: header.shape for name, header in checkpoint.tensors.items()}
        assert shapes == expert_models.shapes_of(config)
        written = make_plan(checkpoint.tensors, checkpoint.config, cache_config(checkpoint.config))
    ours = plan(config, headers(shapes))
    assert [(p.name, p.shape) for p in written.parameters] == [(p.name, p.shape) for p in ours.parameters]


@pytest.fixture(scope="module", params=[family for family in FAMILIES if family != "gpt_oss"])
def saved_in_stacks(request, tmp_path_factory):
    """(a directory, another) of one model as Transformers saves it: each expert's tensors, and one stack of all."""
    transformers = pytest.importorskip("transformers")
    config = {key: value for key, value in expert_models.config_of(request.param).items() if key != "architectures"}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16
    )
    each, stacks = tmp_path_factory.mktemp(f"{request.param}-each"), tmp_path_factory.mktemp(f"{request.param}-stacks")
    model.save_pretrained(each)
    model.save_pretrained(stacks, save_original_format=False)
    return each, stacks


@pytest.mark.parametrize(
    "spot",
    [
        Spot(),
        Spot(tp=4, tp_rank=3),
        Spot(ep=3, ep_rank=1),
        Spot(ep=2, ep_rank=1, round_robin=True),
        Spot(pp=2, pp_rank=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}], ids=str)
def test_experts_in_one_tensor_on_disk_are_those_in_one_each(saved_in_stacks, spot, options):
    each, stacks = (require_as_the_reference(directory, **spot.options, **options) for directory in saved_in_stacks)
    assert dict(each.data) == dict(stacks.data)
    names = stacks.prepared.plan.accounting.loaded
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    assert not any(re.search(r"experts\.\d", name) for name in names)


def test_experts_both_in_one_tensor_and_in_one_each_are_too_many():
    config = expert_models.config_of("qwen3_moe")
    shapes = expert_models.shapes_of(config)
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    with pytest.raises(MissingTensor, match="down_proj") as caught:
        plan(config, headers({**shapes, stack: (6, 32, 32)}))
    assert "model.layers.1.mlp.experts.0.down_proj.weight" in str(caught.value.found)


def test_scales_beside_experts_in_one_tensor_are_refused_by_name():
    """No tool is known to write them, so nothing is known of how they lie."""
    config = expert_models.config_of("qwen3_moe", num_hidden_layers=2)
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    shapes = {name: shape for name, shape in expert_models.shapes_of(config).items() if ".experts." not in name}
    at = "model.layers.1.mlp.experts"
    shapes |= {f"{at}.gate_up_proj": (6, 32, 32), f"{at}.down_proj": (6, 32, 16)}
    with pytest.raises(UnsupportedModel, match=re.escape(at)):
        plan(config, headers(shapes))


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("asked", ["auto", "bfloat16", "float16"])
def test_the_correction_of_scores_is_float32_whatever_is_asked_for(stored, asked):
    config = expert_models.config_of("deepseek_v3")
    made = parameters(plan(config, headers(expert_models.shapes_of(config), stored), dtype=asked))
    bias = made["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert (bias.dtype, bias.transform) == ("float32", None if stored == "float32" else Cast("float32"))
    assert made["model.layers.2.mlp.gate.weight"].dtype == (stored if asked == "auto" else asked)


@pytest.mark.parametrize(
    ("family", "method", "has"),
    [("deepseek_v3", None, True), ("deepseek_v3", "greedy", False), ("deepseek_v2", None, False)],
)
def test_which_models_correct_scores(family, method, has):
    config = expert_models.config_of(family, topk_method="noaux_tc" if has else "greedy")
    shapes = expert_models.shapes_of(config)
    config["topk_method"] = method
    if method is None:
        del config["topk_method"]
    names = {parameter.name for parameter in plan(config, headers(shapes)).parameters}
    assert ("model.layers.1.mlp.gate.e_score_correction_bias" in names) == has


def test_draft_layers_are_ignored_with_the_reason_and_others_are_not():
    config = expert_models.config_of("deepseek_v3")
    shapes = expert_models.shapes_of(config)
    drafts = {name.replace(".layers.2.", ".layers.3."): shapes[name] for name in shapes if ".layers.2." in name}
    drafts |= {"model.layers.3.eh_proj.weight": (32, 64), "model.layers.3.enorm.weight": (32,)}
    for pp in (1, 2):
        accounting = plan(config, headers({**shapes, **drafts}), pp_size=pp, pp_rank=pp - 1).accounting
        assert {name for name, reason in accounting.ignored.items() if "draft" in reason} == drafts.keys()
    for name in ("model.layers.4.enorm.weight", "model.layers.30.enorm.weight"):
        with pytest.raises(UnexpectedTensor, match=re.escape(name)):
            plan(config, headers({**shapes, **drafts, name: (32,)}))
    with pytest.raises(UnexpectedTensor, match="says 3 layers, the files have 4"):
        plan({**config, "num_nextn_predict_layers": 0}, headers({**shapes, **drafts}))


def test_a_missing_expert_of_this_rank_is_named_and_one_of_another_is_its_concern():
    config = expert_models.config_of("mixtral")
    tensors = headers(expert_models.shapes_of(config))
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    del tensors[name]
    for rank, is_here in ((0, True), (1, False)):
        if is_here:
            with pytest.raises(MissingTensor) as caught:
                plan(config, tensors, ep_size=2, ep_rank=rank)
            assert caught.value.expected == name
        else:
            assert plan(config, tensors, ep_size=2, ep_rank=rank).accounting.balanced


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.6.up_proj.weight", "model.layers.1.mlp.gate.weight"])
@pytest.mark.parametrize("spot", [Spot(), Spot(ep=2, ep_rank=1), Spot(pp=3, pp_rank=2)], ids=str)
def test_one_expert_too_many_or_a_router_in_a_dense_layer_is_unexpected_on_every_rank(name, spot):
    config = expert_models.config_of("qwen2_moe")
    with pytest.raises(UnexpectedTensor) as caught:
        plan(config, headers({**expert_models.shapes_of(config), name: (16, 32)}), **spot.options)
    assert caught.value.found == name


def test_a_model_without_shared_experts():
    config = expert_models.config_of("deepseek_v3", n_shared_experts=None)
    shapes = expert_models.shapes_of(expert_models.config_of("deepseek_v3"))
    shapes = {name: shape for name, shape in shapes.items() if ".shared_experts." not in name}
    assert plan(config, headers(shapes)).accounting.balanced


@pytest.mark.parametrize("value", ["all", [1.5], {"0": True}])
def test_a_list_of_dense_layers_that_is_none(value):
    config = expert_models.config_of("qwen3_moe", mlp_only_layers=value)
    with pytest.raises(ModelConfigError, match="mlp_only_layers"):
        plan(config, {})


@pytest.mark.parametrize("value", [-1, "1", 1.0, True])
def test_a_number_of_dense_layers_that_is_none(value):
    config = expert_models.config_of("deepseek_v3", first_k_dense_replace=value)
    with pytest.raises(ModelConfigError, match="first_k_dense_replace"):
        plan(config, {})


def test_what_experts_are_to_a_reader_of_figures():
    config = expert_models.config_of("mixtral")
    tensors = headers(expert_models.shapes_of(config))
    at = "model.layers.0.block_sparse_moe.experts.routed_experts"
    for spot, kinds in ((Spot(tp=2), ("column", "row")), (Spot(ep=2), ("experts", "experts"))):
        made = parameters(plan(config, tensors, **spot.options))
        assert (made[f"{at}.w13_weight"].part_kind, made[f"{at}.w2_weight"].part_kind) == kinds


@pytest.mark.parametrize("spot", [Spot(tp=2, tp_rank=1), Spot(ep=3, ep_rank=2)], ids=str)
@pytest.mark.parametrize("method", ["fp8", "fp8-tensor", "fp8-block=8x16", "int8"])
def test_each_expert_is_quantized_by_itself(model, spot, method):
    outcome = require_as_the_reference(model, quantization=method, **spot.options)
    assert any("_weight_scale" in name for name in outcome.rows)


@pytest.fixture(scope="module", params=["plain", "fp8"])
def huge(request):
    """(config.json, headers) of DeepSeek-V3's layers, so many that there are 100,000 tensors; or with scales, as it is
    published. And the same of a quarter of the layers.
    """
    is_plain = request.param == "plain"
    layers = 133 if is_plain else 68
    return [_deepseek(number, is_plain=is_plain) for number in (layers, layers // 4)]


def _deepseek(layers, *, is_plain):
    config = expert_models.config_of(
        "deepseek_v3",
        num_hidden_layers=layers,
        n_routed_experts=256,
        first_k_dense_replace=3,
        hidden_size=7168,
        moe_intermediate_size=2048,
        num_attention_heads=128,
        intermediate_size=18432,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
    )
    tensors = headers(expert_models.shapes_of(config))
    if is_plain:
        return config, tensors
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    for name, header in list(tensors.items()):
        if "proj" in name:
            scale = f"{name}_scale_inv"
            shape = tuple(-(-extent // 128) for extent in header.shape)
            tensors[name] = dataclasses.replace(header, dtype="float8_e4m3fn", nbytes=math.prod(header.shape))
            tensors[scale] = dataclasses.replace(
                header, name=scale, dtype="float32", shape=shape, nbytes=4 * math.prod(shape)
            )
    return config, tensors


@pytest.mark.parametrize(
    "spot",
    [Spot(), Spot(tp=8, tp_rank=3), Spot(ep=8, ep_rank=7, round_robin=True), Spot(tp=2, ep=4, pp=4, pp_rank=1)],
    ids=str,
)
def test_the_time_to_plan_experts_grows_with_their_number_and_no_faster(huge, spot):
    """Those that this rank leaves to others have to be cheap, too: each is named in its account."""
    (config, tensors), (quarter, some) = huge
    assert len(tensors) >= 100_000
    accounting = plan(config, tensors, **spot.options).accounting
    assert len(accounting.loaded) + len(accounting.ignored) == len(tensors)
    assert costs_at_most(
        12, lambda: plan(config, tensors, **spot.options), of=lambda: plan(quarter, some, **spot.options)
    )


def test_100_000_tensors_of_experts_are_planned_within_200_mib(huge):
    config, tensors = huge[0]
    tracemalloc.start()
    try:
        plan(config, tensors, tp_size=8, tp_rank=3)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes <= 200 << 20
