"""This process as one rank of a group whose other ranks are not there: all that loading a model asks of one.

vLLM's layers ask their group for its size and their rank, and cut by these. Here groups of one process are told that
they are others. Loading that would need a peer's numbers (a scale that ranks share) must not get this process's own for
them: whatever would speak to a peer raises. Used by the adapter, in a process that ends after.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from weightcached.protocol.config import Parallel
from weightcached.protocol.errors import UnsupportedModel

_WITH_PEERS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
)
"""Functions of ``torch.distributed`` that give what other ranks have."""


@contextmanager
def alone_as(parallel: Parallel, gpu: int = 0) -> Iterator[None]:
    """vLLM's groups are initialised in this block, as rank ``parallel``, on the GPU with that number where vLLM uses
    one. vLLM's current config has to be set, and this
    process can be one rank only, once.
    """
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/gloo", local_rank=gpu, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        _become(parallel)
        with _without_peers(parallel):
            yield


def _become(parallel: Parallel) -> None:
    from vllm.distributed import parallel_state

    tensor, stage = (parallel.tp_rank, parallel.tp_size), (parallel.pp_rank, parallel.pp_size)
    # Experts are shared by the devices of a stage; vLLM numbers them as it numbers tensor-parallel ranks.
    for group, (rank, size) in (
        (parallel_state._TP, tensor),
        (parallel_state._EP, tensor),
        (parallel_state._PP, stage),
    ):
        if group is not None:
            group.world_size, group.ranks = size, list(range(size))
            group.rank = group.rank_in_group = rank


@contextmanager
def _without_peers(parallel: Parallel) -> Iterator[None]:
    """Between one rank and itself there is nothing to say; between more, nobody is there to say it."""
    import torch.distributed as distributed

    if parallel.tp_size * parallel.pp_size == 1:
        yield
        return
    found: dict[str, Any] = {name: getattr(distributed, name) for name in _WITH_PEERS}
    for name in found:
        setattr(distributed, name, _refusing(name))
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(distributed, name, function)


def _refusing(name: str) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedModel(
            "loading this model takes numbers of other ranks, and each rank is loaded alone here",
            expected="weights that follow from the checkpoint and the rank",
            found=f"torch.distributed.{name}",
            next_step="serve it at TP size 1, or with another quantization",
        )

    return refuse
