"""A guard: a layout's rules cannot change without its revision, or old and new shards would pass for the same.

Pinned here, for each revision of each layout, is one digest over plans of fixed models: names, shapes, dtypes,
places, and every box. If this fails, either the change was not meant, or the revision has to go up with it.
"""

import hashlib
import json
from typing import Any

import pytest

from tests.support.checkpoints import tiny_config
from tests.support.plans import plan
from weightcached.loader.boxes import Box
from weightcached.loader.layout import Placed, place
from weightcached.loader.plan import Cast, PlannedParameter, Quantize
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
        case Cast(dtype):
            return ["cast", dtype]
        case Quantize(method, shape, products):
            return [method.spelled, shape, [[one.name, one.shape, one.dtype, one.rows] for one in products]]
    return []
