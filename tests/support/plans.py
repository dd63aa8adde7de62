"""Plans for tests from a config alone: headers as a checkpoint of that config would have, in no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tests.support.checkpoints import tiny_config, tiny_shapes
from weightcached.loader.plan import LoadPlan, PlannedParameter, TensorHeader, make_plan
from weightcached.protocol.config import LAYOUT_REVISIONS, CacheConfig, Parallel
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.quantization import Quantization

FILE = "model.safetensors"


def headers(shapes: Mapping[str, tuple[int, ...]], dtype: str = "bfloat16") -> dict[str, TensorHeader]:
    """Name → header, the tensors one after the other in one file."""
    made, offset = {}, 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * itemsize_bytes(dtype)
        made[name] = TensorHeader(name, dtype, shape, FILE, offset, nbytes)
        offset += nbytes
    return made


def cache_config(model: Mapping[str, Any], **options: Any) -> CacheConfig:
    """The cache's config over ``model`` (``config.json``). Options: layout, dtype, quantization, and `Parallel`'s."""
    layout = options.get("layout", "fused")
    return CacheConfig(
        architecture=model["architectures"][0],
        layout=layout,
        layout_revision=LAYOUT_REVISIONS[layout],
        parallel=Parallel(
            **{"tp_size": 1, "tp_rank": 0}
            | {name: value for name, value in options.items() if name in Parallel.model_fields}
        ),
        model=dict(model),
        dtype=options.get("dtype", "auto"),
        quantization=Quantization.named(options.get("quantization", "none")),
    )


def plan(
    model: Mapping[str, Any] | None = None, tensors: Mapping[str, TensorHeader] | None = None, **options: Any
) -> LoadPlan:
    """The plan for ``model`` (the tiny Llama) over ``tensors`` (those a checkpoint of it has)."""
    model = tiny_config() if model is None else model
    tensors = headers(tiny_shapes(model)) if tensors is None else tensors
    return make_plan(tensors, model, cache_config(model, **options))


def parameters(made: LoadPlan) -> dict[str, PlannedParameter]:
    """The plan's parameters by name."""
    return {parameter.name: parameter for parameter in made.parameters}
