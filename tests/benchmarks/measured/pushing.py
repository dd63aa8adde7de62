"""A trainer in a process of its own: its tensors pushed to daemons, or merely copied into fresh memory."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.benchmarks.clock import Clock
from tests.benchmarks.settle import settle
from weightcached.client.publish import stage


def push(files: list[str], runtime_dir: str, name: str, *, settled: bool) -> dict[str, Any]:
    """All tensors, from the first until every rank has them, digested; and, apart from that, until it serves them."""
    tensors = _tensors(files)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    _differ(next(iter(tensors.values())))
    with stage(runtime_dir=runtime_dir, name=name, trainer="benchmark", keep=0) as publication:
        if settled:
            settle(nbytes)
        for each, tensor in tensors.items():
            publication.push(each, tensor)
        publication.commit()
    return {"nbytes": nbytes, "seconds": publication.seconds["push"], "stages": publication.seconds}


def copy(files: list[str], threads: int, *, settled: bool) -> dict[str, Any]:
    """The same tensors by NumPy into one fresh memfd, dealt over so many threads. No digest is made."""
    arrays = [tensor.view(torch.uint8).reshape(-1).numpy() for tensor in _tensors(files).values()]
    nbytes = sum(array.nbytes for array in arrays)
    if settled:
        settle(nbytes)
    fd = os.memfd_create("copy", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    memory = memoryview(mmap.mmap(fd, nbytes))
    places, offset = [], 0
    for array in arrays:
        places.append((np.frombuffer(memory[offset : offset + array.nbytes], np.uint8), array))
        offset += array.nbytes
    clock = Clock()
    team = [threading.Thread(target=_copy_all, args=(places[number::threads],)) for number in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return {"nbytes": nbytes, **clock.read()}


def _copy_all(places: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in places:
        np.copyto(target, source)


def _differ(tensor: torch.Tensor) -> None:
    """From what was pushed before: nothing comes of a push of what is served."""
    tensor.view(-1)[:4] = torch.tensor(list(os.urandom(4)), dtype=tensor.dtype)


def _tensors(files: list[str]) -> dict[str, torch.Tensor]:
    """In memory of this process, not in the page cache's."""
    return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}
