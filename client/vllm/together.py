"""All ranks of an engine say what they have before the first of them computes, and stop together where they differ.

Owns the exchange and :func:`obtain_together`, which is the order of these; the judgement is ``agreement.py``'s. A rank
that failed to attach says so too: were it to stay away, the others would wait for it.

What travels is msgpack in tensors of one size, over vLLM's own group of all ranks on the CPU; the group's object
collectives are not used, because they are pickle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcached.client.agreement import Standing, agree, packed, require_agreement, table_of, unpacked
from weightcached.client.own_loader import note_fallback
from weightcached.client.vllm.obtain import Wish, weights_for
from weightcached.client.weights import WeightSet
from weightcached.protocol.errors import DaemonAbsent
from weightcached.protocol.ranks import rank_word

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("vllm.weightcached")


@dataclass(frozen=True)
class Found:
    """What a rank goes on with: weights of its daemon, or None for vLLM's own loader."""

    place: str
    weights: WeightSet | None


def obtain_together(wish_of: Callable[[], Wish], *, may_fall_back: bool) -> Found:
    """This rank's weights, once all ranks are known to have the same; every rank calls it.

    With ``may_fall_back``, ranks that have all found their place absent go on without. Raises what made this rank fail,
    or RanksDisagree; no lease is left then.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    wish: Wish | None = None
    weights: WeightSet | None = None
    failure: Exception | None = None
    try:
        wish = wish_of()
        weights = weights_for(wish)
    except Exception as error:  # noqa: BLE001  # raised below: first the other ranks are told
        failure = error
    absent = failure if isinstance(failure, DaemonAbsent) and may_fall_back else None
    mine = Standing(
        rank=rank_word(wish.parallel) if wish is not None else f"rank {group.rank_in_group}",
        place=str(wish.place.socket_path) if wish is not None else "unknown",
        source="daemon" if weights is not None else "nothing" if absent is None else "disk",
        version=None if weights is None else weights.version,
        receipts_version=None if weights is None else weights.receipts_version,
        generation=None if weights is None else weights.generation,
        error=None if failure is None or absent is not None else str(failure),
    )
    try:
        standings = exchange(mine, group.cpu_group) if group.world_size > 1 else [mine]
        if failure is not None and absent is None:
            raise failure
        if not agree(standings):
            logger.error("%s", "\n".join(["ranks of this engine:", *table_of(standings)]))
        require_agreement(standings)
    except BaseException:
        if weights is not None:
            weights.close()
        raise
    if wish is not None and absent is not None:
        note_fallback(absent, wish.model_dir)
    return Found(mine.place, weights)


def exchange(mine: Standing, group: ProcessGroup) -> list[Standing]:
    """What all ranks have, in the order of ``group``. Blocks until every one of them has called it."""
    import torch
    import torch.distributed

    with torch.device("cpu"):
        sent = torch.frombuffer(bytearray(packed(mine)), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(received, sent, group=group)
    return [unpacked(bytes(slot.numpy())) for slot in received]
