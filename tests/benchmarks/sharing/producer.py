"""Holds tensors in shared memory, each its own, and gives them to whoever connects. Ends when its standard input does.

`python -m tests.benchmarks.fresh PID sharing.producer:serve JSON`, like every measured process.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from multiprocessing.connection import Listener
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.sharing.wire import DTYPES, agree


def serve(address: str, strategy: str, listed: str) -> dict[str, Any]:
    """Makes the tensors, real zero pages, prints ``serving``, and answers every connection with all of them.

    ``listed`` is a JSON file of (name, dtype code, shape) each: ten thousand do not fit on a command line.
    """
    tensors = json.loads(Path(listed).read_text())
    _raise_descriptor_limit()
    agree(strategy)
    shared = {name: torch.zeros(tuple(shape), dtype=DTYPES[code]).share_memory_() for name, code, shape in tensors}
    listener = Listener(address, family="AF_UNIX", backlog=16)
    threading.Thread(target=_answer, args=(listener, shared), daemon=True).start()
    print("serving", flush=True)
    sys.stdin.read()
    return {"tensors": len(shared)}


def _answer(listener: Listener, shared: dict[str, torch.Tensor]) -> None:
    while True:
        with listener.accept() as connection:
            # What a torch.multiprocessing queue sends: a pickle in which each storage is a handle of its own.
            connection.send_bytes(ForkingPickler.dumps(shared))


def _raise_descriptor_limit() -> None:
    """One descriptor per tensor, and another while it is being fetched: the usual soft limit of 1,024 is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
