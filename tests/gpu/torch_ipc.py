"""What attaching is compared with: torch's own sharing of CUDA tensors between processes, one handle for each.

It pickles; that is torch's way, between two processes of this row, and nothing of ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from tests.gpu.row import require

TIMES = 3


def seconds_to_share(count: int, *, sizes: Sequence[int]) -> list[float]:
    """Until a process that has torch and a context already has ``count`` tensors, of together so many bytes, from here:
    the median for each of ``sizes``. AssertionError when that process ends before it answers.
    """
    import torch

    context = torch.multiprocessing.get_context("spawn")
    channel, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(theirs,))
    receiver.start()
    theirs.close()
    try:
        channel.recv()
        medians = [statistics.median(_share(count, nbytes, channel) for _ in range(TIMES)) for nbytes in sizes]
        channel.send(None)
        receiver.join()
    except (EOFError, ConnectionError):
        receiver.join()
        raise AssertionError(f"the process that torch shares with ended with {receiver.exitcode}") from None
    finally:
        receiver.kill()
        receiver.join()
        channel.close()
    return medians


def _share(count: int, nbytes: int, channel: Any) -> float:
    """Seconds. The tensors are gone again when this returns, on both sides."""
    import torch

    tensors = [torch.ones(nbytes // count, dtype=torch.uint8, device="cuda") for _ in range(count)]
    channel.send(tensors)
    seconds, nbytes_there = channel.recv()
    sent = sum(tensor.nbytes for tensor in tensors)
    require(nbytes_there == sent, f"{nbytes_there} bytes arrived, of {sent} in {count} tensors")
    del tensors
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    return float(seconds)


def _receive(channel: Any) -> None:
    import torch

    torch.ones(1, device="cuda")
    channel.send("ready")
    while True:
        channel.poll(None)  # what is measured begins when it is on its way: making the handles is not counted
        started_s = time.perf_counter()
        tensors = channel.recv()
        if tensors is None:
            return
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started_s
        nbytes = sum(tensor.nbytes for tensor in tensors)
        del tensors
        channel.send((seconds, nbytes))
