"""Gives back generations that nobody needs: when the last lease of one ends, when a newer one takes its place, when
its grace is over, and when another needs the room.

Owns the order (granted to nobody, out of the vault, closed here) and the task that looks again after each of these.
What may be freed is ``generations.py``'s answer. What engines have mapped stays theirs: the pages are given back by the
kernel when the last of them has let go, so room is always measured and never reckoned.
"""

from __future__ import annotations

import asyncio
import logging

from weightcached.daemon.custody import Custody
from weightcached.daemon.record import Record

log = logging.getLogger(__name__)


class Freeing:
    """From :meth:`start` until :meth:`stop`."""

    def __init__(self, record: Record, custody: Custody) -> None:
        self._record = record
        self._custody = custody
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._record.leases.on_end = self.wake
        self._task = asyncio.create_task(self._run(), name="free generations")

    def wake(self) -> None:
        """Something has changed about who needs what."""
        self._woken.set()

    async def _run(self) -> None:
        held = self._record.generations
        while True:
            self._woken.clear()
            self._move_pins()
            # Asked anew after each: while one is given back, another may be leased, pinned, or prepared again.
            while to_free := held.to_free(self._record.leases.generations()):
                await self.drop(to_free[0], reason="nobody needs it")
            try:
                async with asyncio.timeout(held.next_end_of_grace_s()):
                    await self._woken.wait()
            except TimeoutError:
                pass

    def _move_pins(self) -> None:
        """Of versions that were loaded again, onto the newer generation: the older need not be held as well."""
        held = self._record.generations
        for older, newer in held.outdated_pins().items():
            pins = [one for one in self._custody.record.pins if one not in (older, newer)]
            self._custody.change(pins=(*pins, newer))
            held.pins.remove(older)
            held.pins.add(newer)
            log.info("pin moved", extra={"generation": newer, "from": older})

    async def make_room(self) -> bool:
        """Give back the oldest generation that is merely kept for rollback; whether there was one."""
        spare = self._record.generations.spare(self._record.leases.generations())
        if not spare:
            return False
        await self.drop(spare[0], reason="its room is needed")
        return True

    async def drop(self, generation_id: str, *, reason: str) -> None:
        """Give one back. From the call on it is granted to nobody; when this returns the vault has it no
        more, and memory that a holder had is given back."""
        published = self._record.generations.remove(generation_id)
        if published is None:
            return
        version = published.generation.version
        try:
            await published.digesting.stop()
            await self._custody.forget([generation_id])
        finally:
            await published.generation.free()
        log.info("generation dropped", extra={"generation": generation_id, "reason": reason})
        self._record.events.say("generation_dropped", reason, generation=generation_id, version=version)
        self._record.changes.announce()

    async def stop(self) -> None:
        """Look no more. Safe to call twice, and before :meth:`start`."""
        self._record.leases.on_end = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
