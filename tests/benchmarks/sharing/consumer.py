"""Receives every tensor of a producer and says how long it took until the last one could be used."""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Sequence
from multiprocessing.connection import Client
from typing import Any

import torch

from tests.benchmarks.sharing.wire import agree
from tests.benchmarks.turns import Turns


def once(address: str, strategy: str) -> dict[str, Any]:
    """The first time in this process."""
    _prepare(strategy)
    return {"seconds": _receive_all(address)}


def repeatedly(addresses: Sequence[str], strategy: str, *, rounds: int, budget_s: float) -> dict[str, Any]:
    """From each producer in turn, many times, after once each that does not count."""
    _prepare(strategy)
    for address in addresses:
        _receive_all(address)
    turns = Turns(len(addresses), rounds=rounds, budget_s=budget_s)
    for number in turns:
        turns.add(number, _receive_all(addresses[number]))
    return {"seconds": turns.seconds}


def _prepare(strategy: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    agree(strategy)


def _receive_all(address: str) -> float:
    began_s = time.perf_counter()
    with Client(address, family="AF_UNIX") as connection:
        received: dict[str, torch.Tensor] = pickle.loads(connection.recv_bytes())  # noqa: S301 (what is measured)
    tensors = list(received.values())
    tensors[-1].view(torch.uint8)[0, 0].item()
    return time.perf_counter() - began_s
