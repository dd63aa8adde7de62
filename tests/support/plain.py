"""A rank's share of tensors by plain torch: whole tensors are split and concatenated, with no offset anywhere.

The reference that tables of architectures are tested with. It knows what an engine does with each kind of layer, and
nothing of the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.execution import load

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Share:
    """What rank ``index`` of ``size`` keeps."""

    size: int
    index: int

    def rows(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Each cut by its first axis, then stacked: column-parallel layers, and their biases."""
        return torch.cat([self._of(tensor, 0) for tensor in tensors])

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cut by the second axis: a row-parallel layer."""
        return self._of(tensor, 1)

    def qkv(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, kv_heads: int) -> torch.Tensor:
        """Query, key and value, cut by heads; where ranks are more than key/value heads, some have the same."""
        return torch.cat([self._of(query, 0), self._heads(key, kv_heads), self._heads(value, kv_heads)])

    def vocabulary(self, tensor: torch.Tensor) -> torch.Tensor:
        """Padded with zeros to a multiple of 64 rows, then cut."""
        padding = tensor.new_zeros(-len(tensor) % 64, *tensor.shape[1:])
        return self._of(torch.cat([tensor, padding]), 0)

    def _heads(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        each = tensor.reshape(heads, -1, *tensor.shape[1:]).repeat_interleave(max(1, self.size // heads), dim=0)
        return self._of(each, 0).reshape(-1, *tensor.shape[1:])

    def _of(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        assert tensor.shape[axis] % self.size == 0
        return tensor.chunk(self.size, axis)[self.index]


def decoder(*, kv_heads: int) -> Callable[[Tensors, Share], Tensors]:
    """What a rank holds of a decoder whose layers have their parts in tensors of their own, under the usual names."""

    def reference(tensors: Tensors, rank: Share) -> Tensors:
        made = {}
        for name, tensor in tensors.items():
            at, _, ending = name.rpartition(".")
            layer = at.rpartition(".")[0]
            if at.endswith("q_proj"):
                key, value = (tensors[f"{layer}.{part}_proj.{ending}"] for part in "kv")
                made[f"{layer}.qkv_proj.{ending}"] = rank.qkv(tensor, key, value, kv_heads=kv_heads)
            elif at.endswith("gate_proj"):
                made[f"{layer}.gate_up_proj.{ending}"] = rank.rows(tensor, tensors[f"{layer}.up_proj.{ending}"])
            elif at.endswith(("o_proj", "down_proj")):
                made[name] = rank.columns(tensor) if ending == "weight" else tensor
            elif at.endswith(("embed_tokens", "lm_head")):
                made[name] = rank.vocabulary(tensor)
            elif "norm" in at:
                made[name] = tensor
        return made

    return reference


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by the safetensors library."""
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


def same_bytes(array: np.ndarray, tensor: torch.Tensor) -> bool:
    return array.shape == tuple(tensor.shape) and array.tobytes() == (
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    )


def require_every_rank(
    directory: Path,
    reference: Callable[[Tensors, Share], Tensors],
    *,
    size: int,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Load each of ``size`` ranks and compare names and bytes of all parameters with ``reference``'s."""
    tensors = tensors_of(directory)
    for index in range(size):
        outcome = load(directory, layout="fused", tp_size=size, tp_rank=index)
        expected = reference(tensors, Share(size, index))
        rows = outcome.rows
        assert {name for name, row in rows.items() if row.alias_of is None} == expected.keys()
        assert {name: row.alias_of for name, row in rows.items() if row.alias_of is not None} == (aliases or {})
        for name, tensor in expected.items():
            assert same_bytes(outcome.array(name), tensor), f"{name} on rank {index} of {size}"
            assert rows[name].dtype == str(tensor.dtype).removeprefix("torch.")
