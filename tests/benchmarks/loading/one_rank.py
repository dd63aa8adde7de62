"""One tensor-parallel rank of a Llama as other loaders have to make it: each tensor's part copied to its place in fused
parameters of its own. The arithmetic is that of engines' weight loaders, by plain slices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from xxhash import xxh3_128_hexdigest

from tests.benchmarks.clock import Clock

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_FUSED |= {"up_proj": "gate_up_proj"}


class Shard:
    """The rank's parameters, empty, and where parts go. Sizes of the model are all divisible."""

    def __init__(self, directory: str, size: int, rank: int) -> None:
        config = json.loads((Path(directory) / "config.json").read_text())
        self._size, self._rank = size, rank
        head = config["head_dim"]
        queries, keys = config["num_attention_heads"] * head // size, config["num_key_value_heads"] * head // size
        inner = config["intermediate_size"] // size
        self._rows = {
            "q_proj": (0, queries, queries + 2 * keys),
            "k_proj": (queries, keys, queries + 2 * keys),
            "v_proj": (queries + keys, keys, queries + 2 * keys),
            "gate_proj": (0, inner, 2 * inner),
            "up_proj": (inner, inner, 2 * inner),
        }
        self.parameters: dict[str, torch.Tensor] = {}

    def put(self, name: str, shape: Sequence[int], values: Any) -> None:
        """``values`` is a tensor, or something that gives one for an index."""
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if layer in self._rows:
            start, count, total = self._rows[layer]
            fused = name.replace(layer, _FUSED[layer])
            target = self._parameter(fused, (total, shape[1]))[start : start + count]
            target.copy_(values[self._rank * count : (self._rank + 1) * count])
        elif layer in ("o_proj", "down_proj"):
            share = shape[1] // self._size
            target = self._parameter(name, (shape[0], share))
            target.copy_(values[:, self._rank * share : (self._rank + 1) * share])
        elif layer in ("embed_tokens", "lm_head"):
            share = shape[0] // self._size
            target = self._parameter(name, (share, shape[1]))
            target.copy_(values[self._rank * share : (self._rank + 1) * share])
        else:
            self._parameter(name, tuple(shape)).copy_(values[:])

    def _parameter(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.parameters:
            self.parameters[name] = torch.empty(shape, dtype=torch.bfloat16)
        return self.parameters[name]

    def result(self, clock: Clock) -> dict[str, Any]:
        taken = clock.read()
        digests = {
            name: xxh3_128_hexdigest(parameter.contiguous().view(torch.uint8).numpy().tobytes())
            for name, parameter in self.parameters.items()
        }
        return {**taken, "nbytes": sum(one.nbytes for one in self.parameters.values()), "digests": digests}


def safetensors_slices(directory: str, files: Sequence[str], size: int, rank: int) -> dict[str, Any]:
    """``safe_open``'s ``get_slice``: reads what the rank keeps."""
    clock, shard = Clock(), Shard(directory, size, rank)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                part = opened.get_slice(name)
                shard.put(name, part.get_shape(), part)
    return shard.result(clock)


def safetensors_tensors(directory: str, files: Sequence[str], size: int, rank: int) -> dict[str, Any]:
    """``get_tensor``, a view of the mapped file, then the slice: what engines' default loaders do."""
    clock, shard = Clock(), Shard(directory, size, rank)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                tensor = opened.get_tensor(name)
                shard.put(name, tensor.shape, tensor)
    return shard.result(clock)


def runai_streamer(directory: str, files: Sequence[str], size: int, rank: int) -> dict[str, Any]:
    """runai-model-streamer reads whole files; the slice is taken from its buffers."""
    from runai_model_streamer import SafetensorsStreamer

    clock, shard = Clock(), Shard(directory, size, rank)
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(files))
        for name, tensor in streamer.get_tensors():
            shard.put(name, tensor.shape, tensor)
    return shard.result(clock)
