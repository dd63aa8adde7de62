"""What is published: the generation that engines are granted, and what becomes known about it afterwards.

Owns putting it into the record, its digest, proving adopted weights again in the background, and telling the vault's
state what the next keeper has to know. Made by the keeper and ended by it. A generation's descriptors are closed by
whoever stops the keeper.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from weightcached.daemon.custody import Custody
from weightcached.daemon.digesting import Digesting
from weightcached.daemon.generation import CheckpointReceipts, Generation
from weightcached.daemon.proof import ProvenReceipts
from weightcached.daemon.record import Published, Record
from weightcached.daemon.reproving import Contradicted, Proven, Reproving, Verdict
from weightcached.daemon.states import State
from weightcached.protocol.errors import InternalError
from weightcached.protocol.messages import Event

log = logging.getLogger(__name__)


class Publishing:
    """``tell`` says an event to every engine."""

    def __init__(self, record: Record, custody: Custody, tell: Callable[[Event], None]) -> None:
        self._record = record
        self._custody = custody
        self._tell = tell
        self._reproving: Reproving | None = None

    def publish(self, generation: Generation, proven: ProvenReceipts, unproven: str | None) -> None:
        """Serve it from now on: the state becomes ``ready``. What is ``unproven``, for the reason given, is proven in
        the background.
        """
        record, options = self._record, self._record.options
        digesting = Digesting(
            generation.origin.model_dir,
            expected=generation.receipts,
            cache_dir=options.cache_dir,
            trusted_filesystems=options.trusted_filesystems,
            on_digest=lambda digest: self._learn(digest=digest),
            on_end=record.changes.announce,
        )
        proven.on_new = self._learn
        record.published = Published(generation=generation, proven=proven, digesting=digesting, unproven=unproven)
        record.progress.update("ready")
        adopted = record.adoption_seconds is not None
        log.info(
            "published",
            extra={
                "generation": generation.id,
                "version": generation.version,
                "resident_nbytes": generation.resident_nbytes,
                "bytes_read": 0 if adopted else generation.bytes_read,
                "seconds": {"adopt": record.adoption_seconds} if adopted else generation.seconds,
            },
        )
        record.machine.move(State.READY)
        record.events.say("published")
        if unproven is not None:
            self._reproving = Reproving(options, generation, on_verdict=self._judged, on_failure=self._now_unproven)
            self._reproving.start()
        elif generation.digest is None:
            digesting.start()

    def _learn(self, *, digest: str | None = None, receipts: CheckpointReceipts | None = None) -> None:
        """More is known: our digest, receipts under which our files were seen again, or others' in ``proven``."""
        generation = self._published.generation
        if digest is not None:
            generation = generation.with_digest(digest)
        if receipts is not None:
            generation = generation.with_receipts(receipts)
        self._record.published = dataclasses.replace(self._published, generation=generation)
        self._custody.learned(generation, self._published.proven)

    def _judged(self, verdict: Verdict) -> None:
        if isinstance(verdict, Proven):
            self._now_unproven(None)
            self._learn(digest=verdict.answer.digest, receipts=verdict.receipts)
        elif isinstance(verdict, Contradicted):
            self._record.last_error = verdict.error
            self._now_unproven(str(verdict.error))
            log.error("the files are not what is served", extra={"reason": str(verdict.error)})
            generation = self._published.generation.id
            self._tell(Event(kind="failed", generation=generation, message=str(verdict.error)))
            self._record.events.say("failed", str(verdict.error))
        else:
            self._now_unproven(verdict.reason)

    @property
    def _published(self) -> Published:
        if self._record.published is None:
            raise InternalError("something was learned about weights before they were published")
        return self._record.published

    def _now_unproven(self, reason: str | None) -> None:
        self._record.published = dataclasses.replace(self._published, unproven=reason)

    async def stop(self) -> None:
        """End what looks at files in the background."""
        if self._reproving is not None:
            await self._reproving.stop()
        if self._record.published is not None:
            await self._record.published.digesting.stop()
