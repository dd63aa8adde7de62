"""The engine from the cache: the same model, its parameters mapped from the daemon's memory.

``python -m toy_engine.cached MODEL RUNTIME_DIR [--packing N]`` prints what it computes, as JSON, and ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toy_engine.adapter import ADAPTER
from toy_engine.engine import Options, ToyModel, read_config
from weightcached.client import WeightSet, attach
from weightcached.protocol.config import Parallel
from weightcached.protocol.engines import EngineRequest, engine_key


def attached(
    model_dir: Path, arguments: Sequence[str] = (), *, rank: int = 0, size: int = 1, **where: Any
) -> WeightSet:
    """This rank's weights. ``where`` are further options of ``attach``."""
    parallel = Parallel(tp_rank=rank, tp_size=size)
    key = engine_key(ADAPTER.name, EngineRequest(model_dir=model_dir, parallel=parallel, arguments=tuple(arguments)))
    return attach(model_dir, layout=ADAPTER.name, engine=key, tp_rank=rank, tp_size=size, **where)


def bound(
    weights: WeightSet, model_dir: Path, arguments: Sequence[str] = (), *, rank: int = 0, size: int = 1
) -> ToyModel:
    """A model with mapped parameters. Buffers and the table are copies of its own, for it may write to them."""
    with torch.device("meta"):
        model = ToyModel(read_config(model_dir), Options.parse(arguments), rank=rank, size=size)
    for row in weights.manifest:
        owner, _, leaf = row.name.rpartition(".")
        module, tensor = model.get_submodule(owner), weights[row.name]
        if row.kind == "parameter":
            of = row.alias_of
            parameter = nn.Parameter(tensor, requires_grad=False) if of is None else model.get_parameter(of)
            module.register_parameter(leaf, parameter)
        elif row.kind == "buffer":
            module.register_buffer(leaf, tensor.clone(), persistent=row.persistent)
        else:
            setattr(module, leaf, tensor.clone())
    model.scale = float(weights.meta.scalars["scale"] or 0)
    return model.eval()


def main() -> None:
    model_dir, runtime_dir, *arguments = sys.argv[1:]
    with attached(Path(model_dir), arguments, mode="require", runtime_dir=runtime_dir) as weights:
        model = bound(weights, Path(model_dir), arguments)
        with torch.inference_mode():
            logits = model(torch.tensor([1, 2, 3]))
        print(json.dumps({"source": weights.source, "generation": weights.generation, "logits": logits.tolist()}))


if __name__ == "__main__":
    main()
