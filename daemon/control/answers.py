"""What a keeper that changes nothing answers: what it is, and how it is."""

from __future__ import annotations

import time

from weightcached.daemon.record import Record
from weightcached.daemon.snapshot import report
from weightcached.protocol.control import Describe, GenerationInfo, RankInfo, RankState
from weightcached.protocol.errors import ProtocolError
from weightcached.protocol.messages import Message, Status, shortened


class Answers:
    def __init__(self, record: Record) -> None:
        self._record = record

    async def handle(self, request: Message) -> Message:
        if isinstance(request, Describe):
            return self.describe()
        if isinstance(request, Status):
            return report(self._record)
        raise ProtocolError("this daemon cannot do that", found=type(request).__name__)

    def describe(self) -> RankState:
        record = self._record
        parallel, published = record.options.parallel, record.published
        generations: tuple[GenerationInfo, ...] = ()
        if published is not None:
            one = published.generation
            generations = (
                GenerationInfo(
                    generation=one.id,
                    version=one.version,
                    receipts_version=one.receipts_version,
                    standing="current",
                    origin=shortened(one.origin.model_dir),
                    digest=one.digest,
                    resident_nbytes=one.resident_nbytes,
                    leases=len(record.leases),
                    pinned=False,
                    age_s=time.monotonic() - record.started_s,
                ),
            )
        return RankState(
            rank=RankInfo(
                place=record.options.place.name,
                tp_rank=parallel.tp_rank,
                tp_size=parallel.tp_size,
                pp_rank=parallel.pp_rank,
                pp_size=parallel.pp_size,
                ep_rank=parallel.ep_rank,
                ep_size=parallel.ep_size,
            ),
            state=record.state.value,
            vault_id=record.nonce,
            fingerprint=record.config.fingerprint if record.config is not None else None,
            current=generations[0].generation if generations else None,
            generations=generations,
            change=None,
            open=None,
        )
