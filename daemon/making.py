"""Weights for a change: loaded by a worker or pushed by a trainer, beside those that are served; verified, and kept.

Owns admission beside what is held (older generations that are merely kept for rollback make room first) and the
refusals with their numbers. What becomes of a generation is ``changing.py``'s business; a failure here leaves nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable

from weightcached.daemon.adoption import require_same_config
from weightcached.daemon.change_custody import ChangeCustody
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
from weightcached.protocol.errors import InsufficientMemory, ManagerUnreachable, StageLost

STAGE_TIMEOUT_S = 120.0
"""Within which a trainer whose change has begun has to begin to push."""


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
                    raise self._beside(cause) from failure
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

    def _beside(self, error: InsufficientMemory) -> InsufficientMemory:
        """The same, and what is held beside."""
        held = self._record.generations.all
        count = f"{len(held)} generation{'s' if len(held) != 1 else ''}"
        nbytes = binary_size(sum(one.generation.resident_nbytes for one in held))
        return InsufficientMemory(
            error.message,
            expected=error.expected,
            found=f"{error.found}, beside {count} of {nbytes} that are served, leased or pinned",
            where=error.where,
            next_step="free memory or raise that limit; `weightcached generations` shows what is held and why",
        )

    async def check(self, generation: Generation, served: Generation) -> None:
        """Every resident byte, before anybody is told that it is prepared; and that its config and its parameters' form
        are those of what is ``served``.
        """
        require_same_config(served.config, generation.config)
        self._record.progress.update("verify")
        await verify(generation.kind, generation.memory[0], generation.segments, yields=True, beside=served.memory[0])

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
