"""What attaching is compared with: torch's own sharing of CUDA tensors between processes, one handle for each.

It pickles; that is torch's way, between two processes of this row, and nothing of ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

TIMES = 3


def seconds_to_share(count: int, *, sizes: Sequence[int]) -> list[float]:
    """Until a process that has torch and a context already has ``count`` tensors, of together so many bytes, from here:
    the median for each of ``sizes``.
    """
    import torch

    context = torch.multiprocessing.get_context("spawn")
    sent, said = context.SimpleQueue(), context.SimpleQueue()
    receiver = context.Process(target=_receive, args=(sent, said))
    receiver.start()
    try:
        said.get()
        medians = [statistics.median(_share(count, nbytes, sent, said) for _ in range(TIMES)) for nbytes in sizes]
        sent.put(None)
        receiver.join()
    finally:
        receiver.kill()
        receiver.join()
    return medians


def _share(count: int, nbytes: int, sent: Any, said: Any) -> float:
    """Seconds. The tensors are gone again when this returns, on both sides."""
    import torch

    tensors = [torch.ones(nbytes // count, dtype=torch.uint8, device="cuda") for _ in range(count)]
    sent.put(tensors)
    seconds, nbytes_there = said.get()
    if nbytes_there != sum(tensor.nbytes for tensor in tensors):
        raise AssertionError(f"{nbytes_there} bytes arrived of {count} tensors of {nbytes // count} bytes each")
    del tensors
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    return float(seconds)


def _receive(sent: Any, said: Any) -> None:
    import torch

    torch.ones(1, device="cuda")
    said.put("ready")
    while True:
        while sent.empty():  # what is measured begins when it is on its way: making the handles is not counted
            time.sleep(0.001)
        started_s = time.perf_counter()
        tensors = sent.get()
        if tensors is None:
            return
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started_s
        nbytes = sum(tensor.nbytes for tensor in tensors)
        del tensors
        said.put((seconds, nbytes))
