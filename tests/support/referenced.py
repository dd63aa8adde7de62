"""What the loader makes, compared with the naive reference: every name, dtype, shape and byte of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.execution import Outcome, load
from weightcached.loader.reference import Reference
from weightcached.protocol.config import build_config


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, in C order."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def require_as_the_reference(directory: Path, **options: Any) -> Outcome:
    """Load one rank, in layout ``fused`` and alone unless ``options`` say otherwise. Returns the load."""
    options = {"layout": "fused", "tp_size": 1, "tp_rank": 0, **options}
    outcome = load(directory, **options)
    with Reference(directory, build_config(directory, **options)) as reference:
        assert list(reference.missing(outcome.rows)) == []
        for name, row in outcome.rows.items():
            tensor = reference.parameter(name)
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{row.dtype}", row.shape), (name, options)
            assert raw(tensor) == outcome.data[name], (name, options)
    return outcome


def require_every_rank_as_the_reference(directory: Path, *, size: int, **options: Any) -> None:
    for rank in range(size):
        require_as_the_reference(directory, tp_size=size, tp_rank=rank, **options)
