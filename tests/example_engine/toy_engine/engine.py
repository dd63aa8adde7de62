"""The engine: a model, its loader, its post-processing, its options. Knows nothing of weightcached.

Its state after loading has what real engines' states have: a packed parameter, one that is stored transposed, a name
that is tied, buffers of both kinds, a tensor that hangs on a module unregistered, and a scalar.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

DTYPES = {"auto": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """Of the engine. ``packing`` rows of a weight lie interleaved; ``activation`` is no business of the weights."""

    packing: int
    activation: str
    dtype: torch.dtype
    workspace_gib: int

    @classmethod
    def parse(cls, arguments: Sequence[str], dtype: str = "auto") -> Options:
        """Raises ValueError for what cannot be used."""
        parser = argparse.ArgumentParser(prog="toy-engine", exit_on_error=False)
        parser.add_argument("--packing", type=int, default=2)
        parser.add_argument("--activation", choices=("relu", "tanh"), default="relu")
        parser.add_argument("--workspace-gib", type=int, default=0)
        try:
            given, unknown = parser.parse_known_args(list(arguments))
        except argparse.ArgumentError as error:
            raise ValueError(str(error)) from error
        if unknown:
            raise ValueError(f"unknown arguments: {' '.join(unknown)}")
        return cls(given.packing, given.activation, DTYPES[dtype], given.workspace_gib)


def reversed_packing() -> bool:
    """An environment switch that changes bytes."""
    return os.environ.get("TOY_ENGINE_REVERSED", "0") == "1"


class ToyModel(nn.Module):
    """This rank's part: rows of ``up``, columns of ``down``; the embedding whole, which is the head as well."""

    positions: Tensor
    table: Tensor
    """The squares of ``up``'s scales: a tensor that nobody has registered."""

    def __init__(self, config: dict[str, int], options: Options, *, rank: int, size: int) -> None:
        super().__init__()
        self.rows = slice(rank * config["intermediate_size"] // size, (rank + 1) * config["intermediate_size"] // size)
        hidden, inner, dtype = config["hidden_size"], config["intermediate_size"] // size, options.dtype
        self.options = options
        self.embed = nn.Embedding(config["vocab_size"], hidden, dtype=dtype)
        self.up = nn.Linear(hidden, inner, bias=False, dtype=dtype)
        self.down = nn.Linear(inner, hidden, bias=False, dtype=dtype)
        self.head = nn.Linear(hidden, config["vocab_size"], bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(hidden, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(inner), persistent=False)
        self.scale = 1.0

    def load_weights(self, model_dir: Path) -> None:
        with safe_open(model_dir / "model.safetensors", framework="pt") as file, torch.no_grad():
            self.embed.weight.copy_(file.get_tensor("embed.weight"))
            self.up.weight.copy_(file.get_slice("up.weight")[self.rows])
            self.down.weight.copy_(file.get_slice("down.weight")[:, self.rows])

    def post_process(self) -> None:
        """Pack ``up``, store ``down`` transposed, and keep what the packing leaves."""
        packing = self.options.packing
        weight = self.up.weight.detach()
        if packing < 1 or len(weight) % packing:
            raise ValueError(f"packing {packing} does not divide {len(weight)} rows")
        packed = weight.unflatten(0, (-1, packing)).transpose(1, 2).contiguous()
        self.up.weight = nn.Parameter(packed.flip(2) if reversed_packing() else packed, requires_grad=False)
        self.down.weight = nn.Parameter(self.down.weight.detach().t().contiguous().t(), requires_grad=False)
        self.table = packed.float().square().sum(dim=(1, 2))
        self.scale = float(self.table.mean())

    def forward(self, tokens: Tensor) -> Tensor:
        packed = self.up.weight.flip(2) if reversed_packing() else self.up.weight
        hidden = self.embed(tokens) + self.positions.to(self.options.dtype) / len(self.positions)
        inner = nn.functional.linear(hidden, packed.transpose(1, 2).flatten(0, 1))
        inner = inner.relu() if self.options.activation == "relu" else inner.tanh()
        scaled = nn.functional.linear(inner, self.down.weight) * self.scale
        return self.head(scaled + self.table.mean().to(scaled.dtype))


def read_config(model_dir: Path) -> dict[str, int]:
    config: dict[str, int] = json.loads((model_dir / "config.json").read_text())
    return config


def load(model_dir: Path, options: Options, *, rank: int, size: int) -> ToyModel:
    """The engine's own way from disk to a model that can run."""
    torch.empty(options.workspace_gib << 30, dtype=torch.uint8)
    model = ToyModel(read_config(model_dir), options, rank=rank, size=size)
    model.load_weights(model_dir)
    model.post_process()
    return model.eval().requires_grad_(False)
