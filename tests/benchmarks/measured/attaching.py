"""Attaches as an engine does, and says how long it took until the last tensor could be used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch  # imported by every engine anyway, so before the clock starts

from tests.benchmarks.turns import Turns
from weightcached.client import attach


def once(arguments: dict[str, str]) -> dict[str, Any]:
    """The first attach of this process."""
    seconds, count, nbytes = _attach_all(arguments)
    return {"seconds": seconds, "tensors": count, "nbytes": nbytes}


def repeatedly(places: Sequence[dict[str, str]], *, rounds: int, budget_s: float) -> dict[str, Any]:
    """Attaches to each place in turn, many times, after one attach each that does not count."""
    for arguments in places:
        _attach_all(arguments)
    turns = Turns(len(places), rounds=rounds, budget_s=budget_s)
    for number in turns:
        turns.add(number, _attach_all(places[number])[0])
    return {"seconds": turns.seconds}


def _attach_all(arguments: dict[str, str]) -> tuple[float, int, int]:
    """The whole call (config, receipts, connection, checks) and every tensor, the last one's first element read."""
    began_s = time.perf_counter()
    weights = attach(arguments["model"], runtime_dir=arguments["runtime_dir"], name=arguments["name"], mode="require")
    tensors = list(weights.values())
    tensors[-1].view(torch.uint8)[0, 0].item()
    seconds = time.perf_counter() - began_s
    count, nbytes = len(tensors), weights.resident_bytes
    del tensors
    weights.close()
    return seconds, count, nbytes
