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


class _Attempt:
    """What came of one rank's attempt to have its weights."""

    def __init__(self, wish_of: Callable[[], Wish], *, want: str | None, number: int, may_fall_back: bool) -> None:
        """``want`` instead of what the wish says, unless None."""
        self.wish: Wish | None = None
        self.weights: WeightSet | None = None
        self.failure: Exception | None = None
        try:
            self.wish = wish_of()
            self.weights = weights_for(self.wish, want=want)
        except Exception as error:  # noqa: BLE001  # raised by `obtain_together`: first the other ranks are told
            self.failure = error
        self.absent = self.failure if isinstance(self.failure, DaemonAbsent) and may_fall_back else None
        self._number = number

    def standing(self) -> Standing:
        wish, weights = self.wish, self.weights
        return Standing(
            rank=rank_word(wish.parallel) if wish is not None else f"rank {self._number}",
            place=str(wish.place.socket_path) if wish is not None else "unknown",
            source="daemon" if weights is not None else "nothing" if self.absent is None else "disk",
            version=None if weights is None else weights.version,
            receipts_version=None if weights is None else weights.receipts_version,
            generation=None if weights is None else weights.generation,
            error=None if self.failure is None or self.absent is not None else str(self.failure),
        )


def obtain_together(wish_of: Callable[[], Wish], *, leader_first: bool, may_fall_back: bool) -> Found:
    """This rank's weights, once all ranks are known to have the same; every rank calls it, with the same words.

    ``leader_first``: rank 0 has its own first, and the others ask for exactly that version: while the daemons change
    over, each by itself may still grant, or grant already, another one. With ``may_fall_back``, ranks that have all
    found their place absent go on without. Raises what made this rank fail, or RanksDisagree; no lease is left then.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    number, several = group.rank_in_group, group.world_size > 1
    tried: _Attempt | None = None
    try:
        want: str | None = None
        if leader_first and several:
            if number == 0:
                tried = _Attempt(wish_of, want=None, number=number, may_fall_back=may_fall_back)
            waits = Standing(rank=f"rank {number}", place="unknown", source="nothing")
            want = exchange(waits if tried is None else tried.standing(), group.cpu_group)[0].version
        if tried is None:
            tried = _Attempt(wish_of, want=want, number=number, may_fall_back=may_fall_back)
        mine = tried.standing()
        standings = exchange(mine, group.cpu_group) if several else [mine]
        if tried.failure is not None and tried.absent is None:
            raise tried.failure
        if not agree(standings):
            logger.error("%s", "\n".join(["ranks of this engine:", *table_of(standings)]))
        require_agreement(standings)
    except BaseException:
        if tried is not None and tried.weights is not None:
            tried.weights.close()
        raise
    if tried.wish is not None and tried.absent is not None:
        note_fallback(tried.absent, tried.wish.model_dir)
    return Found(mine.place, tried.weights)


def exchange(mine: Standing, group: ProcessGroup) -> list[Standing]:
    """What all ranks have, in the order of ``group``. Blocks until every one of them has called it."""
    import torch
    import torch.distributed

    with torch.device("cpu"):
        sent = torch.frombuffer(bytearray(packed(mine)), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(received, sent, group=group)
    return [unpacked(bytes(slot.numpy())) for slot in received]
