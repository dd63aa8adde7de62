"""The checkpoint's tensors, whole, by the safetensors library. Knows no names and no model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weightcached.protocol.errors import CheckpointError


class NotOnDisk(Exception):
    """No file has this tensor, or any that the parameter of this name could be made of."""


class Files:
    """A context manager: files are open meanwhile."""

    def __init__(self, model_dir: Path) -> None:
        """Raises CheckpointError when they cannot be opened."""
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        """Tensor name → the open file that has it."""
        try:
            for path in _files(model_dir):
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
        except (OSError, ValueError, SafetensorError) as error:
            self._stack.close()
            raise CheckpointError("the reference cannot open the checkpoint", found=error, where=model_dir) from error

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._files))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> torch.Tensor:
        """In memory of its own. Raises NotOnDisk."""
        if name not in self._files:
            raise NotOnDisk(name)
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def is_int8(self, name: str) -> bool:
        """Whether there is a tensor of this name that has one-byte integers."""
        return name in self._files and self._files[name].get_slice(name).get_dtype() == "I8"


def _files(model_dir: Path) -> Iterator[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        yield from (model_dir / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values())))
    elif (model_dir / "model.safetensors").exists():
        yield model_dir / "model.safetensors"
    else:
        yield from model_dir.glob("*.safetensors")
