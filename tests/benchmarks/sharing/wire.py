"""What producer and consumer agree on. Both sides import it, so both have torch imported before any clock starts."""

from __future__ import annotations

import multiprocessing

import torch
import torch.multiprocessing as torch_multiprocessing

DTYPES = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32}
_AUTHKEY = b"tests.benchmarks.sharing"


def agree(strategy: str) -> None:
    """torch's strategy in this process; ``file_descriptor`` is its default. Descriptors are fetched under one key."""
    torch_multiprocessing.set_sharing_strategy(strategy)
    multiprocessing.current_process().authkey = _AUTHKEY
