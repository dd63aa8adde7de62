"""What is published: the generations that engines are granted, and what becomes known about each afterwards.

Owns putting them into the record, which of them is current, their digests, proving adopted weights again in the
background, and telling the vault's state what the next keeper has to know. Made by the keeper and ended by it. A
generation's descriptors are closed by whoever drops it (``freeing.py``), or stops the keeper.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from weightcached.daemon.custody import Custody
from weightcached.daemon.digesting import Digesting
from weightcached.daemon.generation import CheckpointReceipts, Generation
from weightcached.daemon.generations import Published
from weightcached.daemon.holding import Holding
from weightcached.daemon.proof import ProvenReceipts
from weightcached.daemon.record import Record
from weightcached.daemon.reproving import Contradicted, Proven, Reproving, Verdict
from weightcached.daemon.states import State
from weightcached.protocol.messages import Event

DROPS = ("prefix_cache", "kv_cache", "derived_tensors")
"""What an engine has to drop when it switches: whatever it has computed from the weights it had."""

_NO_FILES = "the weights were pushed: there are no files to compare them with"

log = logging.getLogger(__name__)


class Publishing:
    """``tell`` says an event to every engine; ``holding`` watches whose memory it is."""

    def __init__(self, record: Record, custody: Custody, holding: Holding, tell: Callable[[Event], None]) -> None:
        self._record = record
        self._custody = custody
        self._holding = holding
        self._tell = tell
        self._reproving: list[Reproving] = []
        """Those whose process may still run: of what is current, and earlier ones that are being ended."""

    def publish(
        self, generation: Generation, proven: ProvenReceipts, unproven: str | None, *, adopted: bool = False
    ) -> None:
        """Serve it from now on, as the first: the state becomes ``ready``. What is ``unproven``, for the reason given,
        is proven in the background.
        """
        self.hold(generation, proven, unproven, adopted=adopted)
        self._record.generations.make_current(generation.id)
        self._announce(generation, adopted=adopted)
        self._record.machine.move(State.READY)
        self._record.events.say("published", drops=DROPS)
        self._look_at_files(generation, unproven)

    def hold(
        self,
        generation: Generation,
        proven: ProvenReceipts,
        unproven: str | None = None,
        *,
        staged: bool = False,
        adopted: bool = False,
    ) -> None:
        """Have it in the record beside what is current: ``staged``, and then granted to nobody, or as a previous one
        that came back."""
        record, options = self._record, self._record.options
        digesting = Digesting(
            generation.origin.model_dir,
            expected=generation.receipts,
            cache_dir=options.cache_dir,
            trusted_filesystems=options.trusted_filesystems,
            on_digest=lambda digest: self._learn(generation.id, digest=digest),
            on_end=record.changes.announce,
        )
        proven.on_new = partial(self._learn, generation.id)
        record.generations.add(
            Published(
                generation=generation,
                proven=proven,
                digesting=digesting,
                unproven=_NO_FILES if generation.pushed_by is not None else unproven,
                staged=staged,
                adopted=adopted,
            )
        )
        self._holding.watch(generation)

    def switch(self, generation_id: str) -> None:
        """What a change has decided: serve that generation, which is held, from now on. Every engine is told."""
        record = self._record
        record.generations.make_current(generation_id)
        published = record.published
        if published is None:
            raise ValueError("what was made current is not")
        generation = published.generation
        self._announce(generation, adopted=published.adopted)
        record.config = generation.config
        self._tell(
            Event(
                kind="published",
                generation=generation.id,
                message="other weights are served from now on",
                version=generation.version,
                receipts_version=generation.receipts_version,
                drops=DROPS,
            )
        )
        record.events.say("published", drops=DROPS)
        self._look_at_files(generation, published.unproven)

    def _announce(self, generation: Generation, *, adopted: bool) -> None:
        record = self._record
        record.progress.update("ready")
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

    def _look_at_files(self, generation: Generation, unproven: str | None) -> None:
        """Of what is current now; nobody has to know any more what became of the files of the one before."""
        for earlier in self._reproving:
            earlier.cancel()
        self._reproving = [earlier for earlier in self._reproving if not earlier.has_ended]
        published = self._record.published
        if generation.pushed_by is not None or published is None:
            return
        if unproven is not None:
            reproving = Reproving(
                self._record.options,
                generation,
                on_verdict=partial(self._judged, generation.id),
                on_failure=partial(self._now_unproven, generation.id),
            )
            self._reproving.append(reproving)
            reproving.start()
        elif generation.digest is None:
            published.digesting.start()

    def _learn(
        self, generation_id: str, *, digest: str | None = None, receipts: CheckpointReceipts | None = None
    ) -> None:
        """More is known: our digest, receipts under which our files were seen again, or others' in ``proven``."""
        published = self._record.generations.get(generation_id)
        if published is None:
            return
        generation = published.generation
        if digest is not None:
            generation = generation.with_digest(digest)
        if receipts is not None:
            generation = generation.with_receipts(receipts)
        self._record.generations.learn(generation_id, generation=generation)
        self._custody.learned(generation, published.proven)

    def _judged(self, generation_id: str, verdict: Verdict) -> None:
        if isinstance(verdict, Proven):
            self._now_unproven(generation_id, None)
            self._learn(generation_id, digest=verdict.answer.digest, receipts=verdict.receipts)
        elif isinstance(verdict, Contradicted):
            self._record.last_error = verdict.error
            self._now_unproven(generation_id, str(verdict.error))
            log.error("the files are not what is served", extra={"reason": str(verdict.error)})
            self._tell(Event(kind="failed", generation=generation_id, message=str(verdict.error)))
            self._record.events.say("failed", str(verdict.error))
        else:
            self._now_unproven(generation_id, verdict.reason)

    def _now_unproven(self, generation_id: str, reason: str | None) -> None:
        self._record.generations.learn(generation_id, unproven=reason)

    async def stop(self) -> None:
        """End what looks at files in the background."""
        for reproving in self._reproving:
            await reproving.stop()
        for published in self._record.generations.all:
            await published.digesting.stop()
