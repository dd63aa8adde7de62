"""Ways in which checkpoints are quantized: what ``config.json`` says, and what lies in the files for a linear layer."""

from __future__ import annotations

from typing import Any

from tests.support.quantized import Stored

FP8 = Stored("weight", "F8_E4M3", lambda o, i: (o, i), 0)
INT8 = Stored("weight", "I8", lambda o, i: (o, i), 0)
SCALAR = Stored("weight_scale", "F32", lambda o, i: ())
CHANNEL = Stored("weight_scale", "F32", lambda o, i: (o, 1), 0)
INPUT = Stored("input_scale", "F32", lambda o, i: (1,))
GPTQ = (
    Stored("qweight", "I32", lambda o, i: (i // 8, o), 1),
    Stored("qzeros", "I32", lambda o, i: (i // 16, o // 8), 1),
    Stored("scales", "F16", lambda o, i: (i // 16, o), 1),
)
WEIGHT_SHAPE = Stored("weight_shape", "I64", lambda o, i: (2,))
PACKED = (
    Stored("weight_packed", "I32", lambda o, i: (o, i // 8), 0),
    Stored("weight_scale", "BF16", lambda o, i: (o, i // 16), 0),
    WEIGHT_SHAPE,
)


def gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True, **changes}


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def weights(kind: str, num_bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": num_bits, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


DYNAMIC_FP8 = weights("float", 8, "token", dynamic=True)
DYNAMIC_INT8 = weights("int", 8, "token", dynamic=True)

CASES: dict[str, tuple[dict[str, Any], tuple[Stored, ...]]] = {
    "fp8, one scale a tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, (FP8, SCALAR)),
    "fp8, static inputs": ({"quant_method": "fp8", "activation_scheme": "static"}, (FP8, SCALAR, INPUT)),
    "fp8, blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 8]},
        (FP8, Stored("weight_scale_inv", "F32", lambda o, i: (o // 16, i // 8), 0)),
    ),
    "fp8, channels": (compressed("float-quantized", weights("float", 8, "channel"), DYNAMIC_FP8), (FP8, CHANNEL)),
    "fp8, channels in bfloat16": (
        compressed("float-quantized", weights("float", 8, "channel")),
        (FP8, Stored("weight_scale", "BF16", lambda o, i: (o, 1), 0)),
    ),
    "compressed-tensors fp8, static": (
        compressed("float-quantized", weights("float", 8, "tensor"), weights("float", 8, "tensor")),
        (FP8, Stored("weight_scale", "F32", lambda o, i: (1,)), INPUT),
    ),
    "compressed-tensors fp8, blocks": (
        compressed("float-quantized", weights("float", 8, "block", block_structure=[8, 16]), DYNAMIC_FP8),
        (FP8, Stored("weight_scale", "F32", lambda o, i: (o // 8, i // 16), 0)),
    ),
    "int8, channels": (compressed("int-quantized", weights("int", 8, "channel"), DYNAMIC_INT8), (INT8, CHANNEL)),
    "int8, static inputs with zero points": (
        compressed("int-quantized", weights("int", 8, "tensor"), weights("int", 8, "tensor", symmetric=False)),
        (
            INT8,
            SCALAR,
            Stored("input_scale", "F32", lambda o, i: (1,)),
            Stored("input_zero_point", "I8", lambda o, i: (1,)),
        ),
    ),
    "int4, groups": (compressed("pack-quantized", weights("int", 4, "group", group_size=16)), PACKED),
    "int4, groups with zero points": (
        compressed("pack-quantized", weights("int", 4, "group", group_size=16, symmetric=False)),
        (*PACKED, Stored("weight_zero_point", "I32", lambda o, i: (o // 8, i // 16), 0)),
    ),
    "int4, channels": (
        compressed("pack-quantized", weights("int", 4, "channel", group_size=None)),
        (PACKED[0], Stored("weight_scale", "BF16", lambda o, i: (o, 1), 0), WEIGHT_SHAPE),
    ),
    "int8 packed, groups": (
        compressed("pack-quantized", weights("int", 8, "group", group_size=16)),
        (Stored("weight_packed", "I32", lambda o, i: (o, i // 4), 0), *PACKED[1:]),
    ),
    "int4, activation order by group": (
        compressed("pack-quantized", weights("int", 4, "group", group_size=16, actorder="group")),
        (
            PACKED[0],
            Stored("weight_scale", "BF16", lambda o, i: (o, i // 16), 0),
            WEIGHT_SHAPE,
            Stored("weight_g_idx", "I32", lambda o, i: (i,)),
        ),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        (
            Stored("qweight", "I32", lambda o, i: (i, o // 8), 1),
            Stored("qzeros", "I32", lambda o, i: (i // 16, o // 8), 1),
            Stored("scales", "F16", lambda o, i: (i // 16, o), 1),
        ),
    ),
    "gptq": (gptq(), (*GPTQ, Stored("g_idx", "I32", lambda o, i: (i,), needed=False))),
    "gptq without g_idx": (gptq(), GPTQ),
    "gptq of 8 bits, one group": (
        gptq(bits=8, group_size=-1, desc_act=True),
        (
            Stored("qweight", "I32", lambda o, i: (i // 4, o), 1),
            Stored("qzeros", "I32", lambda o, i: (1, o // 4), 1),
            Stored("scales", "F16", lambda o, i: (1, o), 1),
        ),
    ),
    "gptq, activation order": (
        gptq(desc_act=True),
        (
            GPTQ[0],
            # An input may be of any group, so every rank has the scales of all: they are cut by outputs only.
            Stored("qzeros", "I32", lambda o, i: (i // 16, o // 8), 1),
            Stored("scales", "F16", lambda o, i: (i // 16, o), 1),
            Stored("g_idx", "I32", lambda o, i: (i,)),
        ),
    ),
}
