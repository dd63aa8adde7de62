"""Three generations of one layout in two segments, whose numbers are all 1, 2 or 3, and the two steps of a swap. Weight
sets and daemons are the fixtures' (tests/client/conftest.py).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from weightcached.client import Swapped, WeightSet
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.testing import HonestGrant, TensorBytes, honest_grant

N = 64
TIED = {"lm_head.weight": "square"}
SEGMENTS = (("square", "empty", "lm_head.weight"), ("other", "codes"))
"""What lies in each."""


def tensors(value: int) -> dict[str, TensorBytes]:
    """A generation whose numbers are all ``value``: a matrix, and one of each kind of odd tensor."""
    filled = np.full(N * N, value, np.float32).tobytes()
    return {
        "square": TensorBytes("float32", (N, N), filled),
        "other": TensorBytes(
            "bfloat16", (2, 2048), torch.full((4096,), value).bfloat16().view(torch.uint8).numpy().tobytes()
        ),
        "empty": TensorBytes("float16", (0, 4), b""),
        "codes": TensorBytes("uint8", (5000,), bytes([value]) * 5000),
    }


@contextmanager
def generations(config: CacheConfig, *values: int) -> Iterator[list[HonestGrant]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                honest_grant(
                    tensors(value), config=config, receipts=f"{value}" * 64, aliases=TIED, segment_count=len(SEGMENTS)
                )
            )
            for value in values
        ]


def swap(weights: WeightSet, *, generation: str | None = None, version: str | None = None) -> Swapped:
    with weights.stage(generation=generation, version=version) as staged, weights.barrier.stopped() as stopped:
        return staged.swap(stopped)
