"""The keeper's record in the words of the control plane: what a coordinator, and a report, are told about what is held.

Pure readings; nothing is changed here.
"""

from __future__ import annotations

import time

from weightcached.daemon.generations import Published
from weightcached.daemon.record import Record
from weightcached.protocol.config import Parallel
from weightcached.protocol.control import ChangeInfo, RankInfo, RankState
from weightcached.protocol.messages import GENERATIONS_MAX, GenerationInfo, shortened

_ORIGIN_MAX_CHARACTERS = 1024


def rank_info(name: str, parallel: Parallel) -> RankInfo:
    """Which rank of which group."""
    return RankInfo(
        place=name,
        tp_rank=parallel.tp_rank,
        tp_size=parallel.tp_size,
        pp_rank=parallel.pp_rank,
        pp_size=parallel.pp_size,
        ep_rank=parallel.ep_rank,
        ep_size=parallel.ep_size,
    )


def generation_infos(record: Record) -> tuple[GenerationInfo, ...]:
    """Everything that is held, the current one first, then the others, the newest first."""
    leases = record.leases.counts()
    return tuple(_info(record, one, leases[one.generation.id]) for one in record.generations.all[:GENERATIONS_MAX])


def _info(record: Record, published: Published, leases: int) -> GenerationInfo:
    generation, held = published.generation, record.generations
    return GenerationInfo(
        generation=generation.id,
        version=generation.version,
        receipts_version=generation.receipts_version,
        standing=held.standing(generation.id),
        origin=shortened(generation.came_from)[:_ORIGIN_MAX_CHARACTERS],
        digest=generation.digest,
        resident_nbytes=generation.resident_nbytes,
        leases=leases,
        pinned=held.is_pinned(generation.id),
        pinned_for_s=None if generation.id in held.pins else held.pinned_for_s(generation.id),
        age_s=time.monotonic() - published.since_s,
    )


def rank_state(record: Record, *, vault_id: str, change: ChangeInfo | None, opened: str | None) -> RankState:
    """Everything that a coordinator has to know about this rank. ``opened``: the change that is open in the leader's
    record.
    """
    published = record.published
    return RankState(
        rank=rank_info(record.options.place.name, record.options.parallel),
        state=record.state.value,
        vault_id=vault_id,
        fingerprint=record.config.fingerprint if record.config is not None else None,
        current=published.generation.id if published is not None else None,
        generations=generation_infos(record),
        change=change,
        open=opened,
    )
