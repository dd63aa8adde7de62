"""safetensors' own two ways. Both give views of a mapped file; a clone makes them the process's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.benchmarks.clock import Clock
from tests.benchmarks.loading.kept import result


def load_file_and_clone(directory: str, files: Sequence[str], sample: str) -> dict[str, Any]:
    """``load_file`` of each file, every tensor cloned."""
    tensors: dict[str, torch.Tensor] = {}
    clock = Clock()
    for file in files:
        tensors.update({name: tensor.clone() for name, tensor in load_file(file).items()})
    return result(clock.read(), tensors, sample)


def safe_open_and_clone(directory: str, files: Sequence[str], sample: str) -> dict[str, Any]:
    """``get_tensor`` one by one, each cloned."""
    tensors: dict[str, torch.Tensor] = {}
    clock = Clock()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                tensors[name] = opened.get_tensor(name).clone()
    return result(clock.read(), tensors, sample)
