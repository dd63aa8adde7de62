"""Checkpoints as Transformers writes them: its names, its shapes, and its config.json, which leaves defaults out."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers")


def write(directory: Path, architecture: str, config: Mapping[str, Any]) -> Path:
    """Save a bfloat16 model of this class of Transformers, every element of it random. ``config`` makes its config."""
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**config)).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            of_its_name = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=of_its_name))
    model.save_pretrained(directory)
    return directory
