"""Weights for a change: loaded by a worker or pushed by a trainer, beside those that are served; verified, and kept.

Owns admission beside what is held (older generations that are merely kept for rollback make room first) and the
refusals with their numbers. What becomes of a generation is ``changing.py``'s business; a failure here leaves nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable

from weightcached.daemon.adoption import require_same_config
from weightcached.daemon.change_custody import ChangeCustody
from weightcached.daemon.digesting import compute
from weightcached.daemon.finding import Finding
from weightcached.daemon.freeing import Freeing
from weightcached.daemon.generation import Generation, Origin
from weightcached.daemon.loading import load
from weightcached.daemon.record import Record
from weightcached.daemon.state_record import PreparedRecord
from weightcached.daemon.text import binary_size
from weightcached.daemon.verifying import verify
from weightcached.daemon.worker_process import TransientFailure
from weightcached.protocol.control import FromCheckpoint
from weightcached.protocol.errors import InsufficientMemory, ManagerUnreachable, StageLost, WeightCacheError

STAGE_TIMEOUT_S = 120.0
"""Within which a trainer whose change has begun has to begin to push."""

log = logging.getLogger(__name__)

Make = Callable[[], Awaitable[Generation]]
"""Makes the weights of a change; the generation is the caller's. Raises the error that stands."""


class Making:
    def __init__(self, record: Record, changes: ChangeCustody, freeing: Freeing, finding: Finding) -> None:
        self._record = record
        self._changes = changes
        self._freeing = freeing
        self._finding = finding

    async def loaded(self, source: FromCheckpoint, served: Generation) -> Generation:
        """Loaded beside what is ``served``, in a worker; configs are compared before anything is read. Raises
        ServedAlready where it came from these very files.
        """
        self._record.progress.update("resolve")
        request = await self._finding.request(Origin.of(source.model_dir, hub_id=source.hub_id))
        require_same_config(
            served.config,
            request.config,
            message="the weights that are served cannot be changed for these: they are of another configuration",
            next_step="serve these under another --name, or restart the daemons with them",
        )
        started_s = time.monotonic()
        request = dataclasses.replace(request, yields=True, make_room=self._freeing.make_room, served=served)
        while True:
            try:
                made = await load(request, self._record.progress)
                break
            except (TransientFailure, InsufficientMemory) as failure:
                cause = failure.cause if isinstance(failure, TransientFailure) else failure
                if not isinstance(cause, InsufficientMemory):
                    raise cause from failure
                if not await self._freeing.make_room():  # what a worker itself needs was not admitted with the weights
                    raise beside_what_is_held(cause, self._record) from failure
        self._record.load_durations.add(time.monotonic() - started_s)
        return self._by_change(made)

    async def pushed(self, make: asyncio.Future[Make]) -> Generation:
        """What a trainer pushes, who has to begin soon: ``make`` is known once it has."""
        self._record.progress.update("wait for the trainer")
        try:
            async with asyncio.timeout(STAGE_TIMEOUT_S):
                making = await make
        except TimeoutError as error:
            raise StageLost(
                "the trainer has not begun to push in time",
                expected=f"within {STAGE_TIMEOUT_S:g} s",
                found="a change that nobody pushes for",
                next_step="push again",
            ) from error
        return self._by_change(await making())

    def _by_change(self, made: Generation) -> Generation:
        return dataclasses.replace(made, under_model=self._record.options.model)

    async def checked(self, generation: Generation, served: Generation) -> Generation:
        """Every resident byte, before anybody is told that it is prepared; and that its config and its parameters' form
        are those of what is ``served``. The same generation, about which more may be known then.
        """
        require_same_config(served.config, generation.config)
        self._record.progress.update("verify")
        same = await verify(
            generation.kind, generation.memory[0], generation.segments, yields=True, beside=served.memory[0]
        )
        return await self._called_by_digest(generation, served.id) if same else generation

    async def _called_by_digest(self, generation: Generation, served_id: str) -> Generation:
        """Every byte at this rank is what is served: they may be one version, of which one too many would be held, and
        what can be rolled back to would make way for it. Other ranks may differ, so the bytes do not tell, but the
        content digests of both do: for once they are waited for. Where one cannot be had they count as two versions.
        """
        served = self._record.generations.get(served_id)
        if served is None or generation.pushed_by or served.generation.pushed_by:
            return generation
        self._record.progress.update("digest")
        if served.generation.digest is None:
            served.digesting.start()
        while served.digesting.running:
            await self._record.changes.wait()
        if generation.digest is not None:
            return generation
        options = self._record.options
        try:
            answer = await compute(
                generation.origin.model_dir,
                cache_dir=options.cache_dir,
                trusted_filesystems=options.trusted_filesystems,
                expect_receipts=generation.receipts.sha256,
            )
        except WeightCacheError as error:
            log.warning("no content digest", extra={"error": str(error)})
            return generation
        return generation.with_digest(answer.digest)

    async def entrust(self, generation: Generation, waiting: PreparedRecord) -> None:
        """Into the vault; older ones that are merely kept for rollback make room there, too. Not where the vault could
        not be asked: nothing says then that it is full.
        """
        self._record.progress.update("vault")
        while (keeping := await self._changes.stage(generation, waiting)).state == "dropped":
            if keeping.unreachable:
                raise ManagerUnreachable(
                    "the vault cannot be asked whether it keeps what the change has made",
                    found=keeping.reason,
                    next_step="see whether systemd, or `weightcached supervise`, still runs; then begin anew",
                )
            if not await self._freeing.make_room():
                raise ManagerUnreachable(
                    "the vault does not keep another generation beside what is served",
                    found=keeping.reason,
                    next_step="let the service manager keep more descriptors (FileDescriptorStoreMax=, --store-max)",
                )


def beside_what_is_held(error: InsufficientMemory, record: Record) -> InsufficientMemory:
    """The same of a change, and what is held beside: nothing that is kept for rollback alone can make room any more."""
    held = record.generations.all
    count = f"{len(held)} generation{'s' if len(held) != 1 else ''}"
    nbytes = binary_size(sum(one.generation.resident_nbytes for one in held))
    return InsufficientMemory(
        error.message,
        expected=error.expected,
        found=f"{error.found}, beside {count} of {nbytes} that are served, leased or pinned",
        where=error.where,
        next_step="free memory or raise that limit; `weightcached generations` shows what is held and why",
    )
