"""What attaching is compared with: torch's own sharing of CUDA tensors between processes, one handle for each.

It pickles; that is torch's way, between two processes of this row, and nothing of ours.
"""

from __future__ import annotations

import time
from typing import Any


def seconds_to_share(count: int, *, nbytes: int) -> float:
    """Until a process that has torch and a context already has ``count`` tensors, of together ``nbytes``, from here."""
    import torch

    context = torch.multiprocessing.get_context("spawn")
    sent, said = context.SimpleQueue(), context.SimpleQueue()
    receiver = context.Process(target=_receive, args=(sent, said))
    receiver.start()
    try:
        said.get()
        each = nbytes // count
        sent.put([torch.ones(each, dtype=torch.uint8, device="cuda") for _ in range(count)])
        seconds: float = said.get()
        sent.put(None)
        receiver.join()
    finally:
        receiver.kill()
        receiver.join()
    return seconds


def _receive(sent: Any, said: Any) -> None:
    import torch

    torch.ones(1, device="cuda")
    said.put("ready")
    while sent.empty():  # what is measured begins when it is on its way: making the handles is not counted
        time.sleep(0.001)
    started_s = time.perf_counter()
    tensors = sent.get()
    torch.cuda.synchronize()
    said.put(time.perf_counter() - started_s)
    sent.get()
    del tensors
