"""All ranks of an engine say what they have before the first of them computes, and stop together where they differ.

Owns :class:`Standing` (what one rank says), the exchange, the judgement, and :func:`obtain_together`, which is the
order of these. A rank that failed to attach says so too: were it to stay away, the others would wait for it.

What travels is msgpack in tensors of one size, over vLLM's own group of all ranks on the CPU; the group's object
collectives are not used, because they are pickle. The judgement is pure: same source, and the same version. Versions of
one content are two while daemons are learning its digest, one after the other; then the version by receipts decides
(both are in every grant).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgpack

from weightcached.client.own_loader import note_fallback
from weightcached.client.vllm.obtain import Wish, weights_for
from weightcached.client.weights import WeightSet
from weightcached.protocol.errors import DaemonAbsent, RanksDisagree
from weightcached.protocol.frozen import Frozen
from weightcached.protocol.ranks import rank_word
from weightcached.protocol.text import table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("vllm.weightcached")

SLOT_NBYTES = 8192
"""Room for one rank's words: a length of four bytes, then msgpack."""
_ERROR_MAX_CHARACTERS = 1000


class Standing(Frozen):
    """What one rank has. Versions and generation are None where the weights are not a daemon's."""

    rank: str
    """The device word of its place."""
    place: str
    source: Literal["daemon", "disk", "nothing"]
    """``disk``: no daemon's socket is there, and vLLM's own loader may be used."""
    version: str | None = None
    receipts_version: str | None = None
    generation: str | None = None
    error: str | None = None
    """Why it has nothing."""

    def row(self) -> tuple[str, ...]:
        return (self.rank, self.source, self.version or "-", self.generation or "-", self.place, self.error or "")


def packed(standing: Standing) -> bytes:
    """The content of one slot."""
    fields = standing.model_dump()
    if standing.error is not None:
        fields["error"] = standing.error.encode("ascii", "backslashreplace").decode()[:_ERROR_MAX_CHARACTERS]
    body: bytes = msgpack.packb(fields)
    return (len(body).to_bytes(4, "little") + body).ljust(SLOT_NBYTES, b"\0")


def unpacked(slot: bytes) -> Standing:
    """What :func:`packed` was given. Raises ValueError for anything else."""
    nbytes = int.from_bytes(slot[:4], "little")
    if nbytes > len(slot) - 4:
        raise ValueError("a rank sent a slot that cannot be")
    return Standing.model_validate(msgpack.unpackb(slot[4 : 4 + nbytes]))


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


def agree(standings: Sequence[Standing]) -> bool:
    """Whether all have the same of the same."""
    if {standing.source for standing in standings} not in ({"daemon"}, {"disk"}):
        return False
    versions = {standing.version for standing in standings}
    receipts_versions = {standing.receipts_version for standing in standings}
    return len(versions) == 1 or len(receipts_versions) == 1


def require_agreement(standings: Sequence[Standing]) -> None:
    """Raises RanksDisagree with the table of who has what, unless they :func:`agree`."""
    if not agree(standings):
        raise RanksDisagree(
            "the ranks of this engine do not have the same weights",
            expected="one version on all ranks, from daemons, or no daemon's socket for any of them",
            found=" | ".join(" ".join(filter(None, one.row())) for one in standings),
            next_step="start a daemon for each rank, of the same checkpoint (`weightcached up`, `weightcached status` "
            "shows them), and then the engine again",
        )


def table_of(standings: Sequence[Standing]) -> list[str]:
    """Who has what, a line for each rank under a heading."""
    return table([("rank", "source", "version", "generation", "place", "error"), *(one.row() for one in standings)])
