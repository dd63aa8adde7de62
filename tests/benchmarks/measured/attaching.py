"""Attaches as an engine does, and says how long it took until the last tensor could be used."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch  # imported by every engine anyway, so before the clock starts

from tests.benchmarks.turns import Turns
from weightcached.client import attach


def once(arguments: dict[str, str]) -> dict[str, Any]:
    """The first attach of this process."""
    return asdict(_attach_all(arguments))


def repeatedly(places: Sequence[dict[str, str]], *, rounds: int, budget_s: float) -> dict[str, Any]:
    """Attaches to each place in turn, many times, after one attach each that does not count."""
    for arguments in places:
        _attach_all(arguments)
    turns = Turns(len(places), rounds=rounds, budget_s=budget_s)
    whole: list[list[float]] = [[] for _ in places]
    for number in turns:
        attached = _attach_all(places[number])
        turns.add(number, attached.seconds)
        whole[number].append(attached.whole_s)
    return {"seconds": turns.seconds, "whole_s": whole}


@dataclass(frozen=True)
class _Attached:
    seconds: float
    """From connecting to the last tensor's first element."""
    whole_s: float
    """The same and what comes before: config.json, receipts."""
    tensors: int
    nbytes: int


def _attach_all(arguments: dict[str, str]) -> _Attached:
    """Attach, make every tensor, and read the last one's first element."""
    connecting_s: list[float] = []

    def reach(*words: Any, **more: Any) -> Any:
        connecting_s.append(time.perf_counter())
        return real_reach(*words, **more)

    steps = importlib.import_module("weightcached.client.attach")
    real_reach = steps.reach
    steps.reach = reach  # type: ignore[attr-defined]
    try:
        return _attach(arguments, connecting_s)
    finally:
        steps.reach = real_reach  # type: ignore[attr-defined]


def _attach(arguments: dict[str, str], connecting_s: list[float]) -> _Attached:
    began_s = time.perf_counter()
    weights = attach(arguments["model"], runtime_dir=arguments["runtime_dir"], name=arguments["name"], mode="require")
    tensors = list(weights.values())
    tensors[-1].view(torch.uint8)[0, 0].item()
    ended_s = time.perf_counter()
    attached = _Attached(ended_s - connecting_s[0], ended_s - began_s, len(tensors), weights.resident_bytes)
    del tensors
    weights.close()
    return attached
