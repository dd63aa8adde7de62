"""A guard: a layout's rules cannot change without its revision, or old and new shards would pass for the same.

Pinned here, for each revision of each layout, is one digest over plans of fixed models: names, shapes, dtypes,
places, and every box. If this fails, either the change was not meant, or the revision has to go up with it.
"""

import hashlib
import json
from typing import Any

import pytest

from tests.support import expert_models
from tests.support.checkpoints import tiny_config
from tests.support.plans import FILE, headers, plan
from tests.support.quantized import config_of, tensors_of
from tests.support.quantized_cases import CASES
from tests.support.spots import Spot
from weightcached.loader.architectures import ARCHITECTURES
from weightcached.loader.architectures.ranks import Rank
from weightcached.loader.boxes import Box
from weightcached.loader.layout import Placed, place
from weightcached.loader.plan import Cast, PlannedParameter, Quantize, TensorHeader
from weightcached.protocol.config import LAYOUT_REVISIONS

PINNED = {
    ("hf", 1): "8d52223dbc1ea59e040b19007a6cb8b4c16f6f3a22a0707e5e8efd5e900f9f3b",
    ("fused", 1): "9b7fa93726ccda94584b0fbca940666ee50d1c7ee22e1934e591031a959de6dd",
}

MODELS = {
    "llama": tiny_config(),
    "llama with everything": tiny_config(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, vocab_size=300),
    "mistral": tiny_config(architecture="MistralForCausalLM", num_key_value_heads=4),
    "qwen2": tiny_config(architecture="Qwen2ForCausalLM", num_key_value_heads=1),
    "qwen3": tiny_config(architecture="Qwen3ForCausalLM", head_dim=6, vocab_size=64),
}
QUANTIZATIONS = ("fp8-tensor", "fp8-block=16x24", "int8", "int4=8", "int4-asym=8")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "hf": [{}, {"dtype": "float32"}],
    "fused": [
        {"tp_size": size, "tp_rank": rank, **more}
        for size, rank in ((1, 0), (2, 1), (4, 2))
        for more in ({}, {"dtype": "float16"}, {"quantization": "fp8"})
    ]
    + [{"quantization": name} for name in QUANTIZATIONS],
}


@pytest.mark.parametrize("layout", LAYOUT_REVISIONS)
def test_rules_change_only_with_their_revision(layout):
    revision = LAYOUT_REVISIONS[layout]
    described = [
        [name, options, [describe(placed) for placed in place(plan(model, layout=layout, **options)).placed]]
        for name, model in MODELS.items()
        for options in OPTIONS[layout]
    ]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    assert (layout, revision) in PINNED, f"pin revision {revision} of layout {layout!r} here: {digest}"
    assert digest == PINNED[layout, revision], (
        f"the rules of layout {layout!r} are not those of revision {revision} any more: raise "
        f"LAYOUT_REVISIONS[{layout!r}] to {revision + 1} in protocol/config.py, and pin {digest} for it here"
    )


GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 24, "vocab_size": 100}
FAMILIES = {
    "BertModel": tiny_config(max_position_embeddings=40, type_vocab_size=2),
    "BertForMaskedLM": tiny_config(max_position_embeddings=40, type_vocab_size=2, tie_word_embeddings=None),
    "BertForSequenceClassification": tiny_config(max_position_embeddings=40, type_vocab_size=2),
    "BertForTokenClassification": tiny_config(max_position_embeddings=40, type_vocab_size=2),
    "GemmaForCausalLM": tiny_config(tie_word_embeddings=None),
    "Gemma2ForCausalLM": tiny_config(tie_word_embeddings=None, attention_bias=True),
    "Gemma3ForCausalLM": tiny_config(tie_word_embeddings=None),
    "GPT2LMHeadModel": GPT2,
    "Olmo2ForCausalLM": tiny_config(),
    "Phi3ForCausalLM": tiny_config(tie_word_embeddings=True),
}
"""Families that came later, each with a digest of its own: another one does not change those that are there."""

PINNED_FAMILIES = {
    "BertModel": "3a8377e1359e4e6d",
    "BertForMaskedLM": "f28162bd5f32f855",
    "BertForSequenceClassification": "84c92a27c56932df",
    "BertForTokenClassification": "c1bb09af504974b9",
    "GemmaForCausalLM": "462b5578d23f3a21",
    "Gemma2ForCausalLM": "136221d059aeea82",
    "Gemma3ForCausalLM": "2293f99cca7df3d0",
    "GPT2LMHeadModel": "e0f04e8aba7fcbd7",
    "Olmo2ForCausalLM": "04bec99ebd0c13b8",
    "Phi3ForCausalLM": "b2bb7ffdf73cc4b4",
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_s_rules_change_only_with_the_revision(architecture):
    model = {**FAMILIES[architecture], "architectures": [architecture]}
    table = ARCHITECTURES[architecture]
    wanted = table.wanted(table.shape_of(model), Rank(1, 0))
    tensors = headers({part.source: part.shape for one in wanted for part in one.parts})
    described = [
        [describe(placed) for placed in place(plan(model, tensors, tp_size=size, tp_rank=size - 1)).placed]
        for size in (1, 2, 4)
    ]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    assert architecture in PINNED_FAMILIES, f"pin {architecture} here: {digest}"
    assert PINNED_FAMILIES[architecture] == digest, (
        f"the rules of {architecture} are not those that were pinned: if that is meant, raise "
        f"LAYOUT_REVISIONS['fused'] in protocol/config.py, and pin {digest} for it here"
    )


EXPERT_PLACES = (
    Spot(),
    Spot(tp=4, tp_rank=3),
    Spot(ep=3, ep_rank=1),
    Spot(ep=2, ep_rank=1, round_robin=True),
    Spot(tp=2, tp_rank=1, ep=2, ep_rank=1, pp=2, pp_rank=1),
    Spot(pp=3, pp_rank=0),
)
PINNED_EXPERTS = {
    "mixtral": "23409a9b038443d4",
    "qwen2_moe": "3430972dd125fbc5",
    "qwen3_moe": "30172562c4d9119a",
    "deepseek_v2": "b313d70f04063d16",
    "deepseek_v3": "2080f44b643e769e",
    "gpt_oss": "e995e96ef545f7be",
}
"""Families with experts, in every kind of parallelism."""


@pytest.mark.parametrize("family", expert_models.CONFIGS)
def test_the_rules_of_a_family_with_experts_change_only_with_the_revision(family):
    model = expert_models.config_of(family)
    tensors = headers(expert_models.shapes_of(model))
    places = [*(spot.options for spot in EXPERT_PLACES), {"quantization": "fp8"}]
    described = [[describe(placed) for placed in place(plan(model, tensors, **at)).placed] for at in places]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    assert family in PINNED_EXPERTS, f"pin {family} here: {digest}"
    assert PINNED_EXPERTS[family] == digest, (
        f"the rules of {family} are not those that were pinned: if that is meant, raise "
        f"LAYOUT_REVISIONS['fused'] in protocol/config.py, and pin {digest} for it here"
    )


PINNED_QUANTIZED = {
    "fp8, one scale a tensor": "0a86834318acfab7",
    "fp8, static inputs": "9e3cfd349f39794b",
    "fp8, blocks": "18989187c3215fee",
    "fp8, channels": "9b0de7ed30d560ea",
    "fp8, channels in bfloat16": "c131350a78ff600b",
    "compressed-tensors fp8, static": "9e3cfd349f39794b",
    "compressed-tensors fp8, blocks": "1ef36350e5688b15",
    "int8, channels": "ae8d2497b4c22385",
    "int8, static inputs with zero points": "d71d5ad637d5fc89",
    "int4, groups": "a4e82fe8313a3aee",
    "int4, groups with zero points": "17434057673b753d",
    "int4, channels": "c42d3194dec8d2f4",
    "int8 packed, groups": "a3a8a00abcb34bb7",
    "int4, activation order by group": "12d7b5cce8549390",
    "awq": "3535e745f8f0b5b1",
    "gptq": "574a9aa8837834ca",
    "gptq without g_idx": "574a9aa8837834ca",
    "gptq of 8 bits, one group": "576fc19b320eda69",
    "gptq, activation order": "5eab6711dcd00ddc",
}
"""Ways in which checkpoints are quantized already, each with a digest of its own."""


@pytest.mark.parametrize("case", CASES)
def test_the_rules_of_a_quantized_checkpoint_change_only_with_the_revision(case):
    quantization, scheme = CASES[case]
    model = config_of(quantization, num_hidden_layers=1)
    tensors = {
        name: TensorHeader(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), FILE, 0, 0)
        for name, tensor in tensors_of(model, scheme).items()
    }
    described = [
        [describe(placed) for placed in place(plan(model, tensors, tp_size=size, tp_rank=size - 1)).placed]
        for size in (1, 2, 4)
    ]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    assert PINNED_QUANTIZED.get(case) == digest, (
        f"the rules of {case} are not those that were pinned: if that is meant, raise "
        f"LAYOUT_REVISIONS['fused'] in protocol/config.py, and pin {digest} for it here"
    )


def describe(placed: Placed) -> list:
    """What decides the bytes of one parameter, without anything that is only told to people."""
    parameter = placed.parameter
    return [
        [placed.offset, placed.nbytes, parameter.name, parameter.shape, parameter.dtype, parameter.source_dtype],
        [
            [copy.tensor.name, box(copy.source), box(copy.destination), *(["transposed"] if copy.transposed else [])]
            for copy in parameter.copies
        ],
        [box(zeros) for zeros in parameter.zeros],
        transform(parameter),
        [parameter.alias_of, parameter.produced_by, parameter.kind, parameter.persistent],
    ]


def box(value: Box) -> list:
    return [value.start, value.shape]


def transform(parameter: PlannedParameter) -> list:
    match parameter.transform:
        case Cast(dtype, finite):
            return ["cast", dtype, *(["finite"] if finite else [])]
        case Quantize(method, shape, products):
            return [method.spelled, shape, [[one.name, one.shape, one.dtype, one.rows] for one in products]]
    return []
