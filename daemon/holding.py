"""What the end of a holder means, for kinds whose memory dies with its process: every generation that is held is
watched.

Owns the tasks that wait, and telling a death from a letting go: who lets a generation go has taken it out of the record
before. The death of the current one's holder is for the keeper, which has nothing to serve then and ends. Another's
takes that generation alone: it is granted to nobody from then on, and a change that had prepared it has failed. Engines
that read it are told by the kernel (``holder.py``), whatever becomes of us. Used on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from weightcached.daemon.generation import Generation
from weightcached.daemon.holder import Holder
from weightcached.daemon.record import Record
from weightcached.protocol.errors import HolderDied

Lose = Callable[[str, HolderDied], Awaitable[None]]
"""Gives up the generation of that id, whose memory is gone for that reason."""

log = logging.getLogger(__name__)


class Holding:
    """Of one keeper, until :meth:`stop`."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._lose: Lose | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self.current_lost: asyncio.Future[HolderDied] = asyncio.get_running_loop().create_future()
        """Done when the memory of what is current is gone."""

    def begin(self, lose: Lose) -> None:
        """Something is served: others may be held beside it from now on."""
        self._lose = lose

    def watch(self, generation: Generation) -> None:
        """It is in the record from now on. Nothing, where its memory has no holder."""
        if generation.holder is None:
            return
        task = asyncio.create_task(self._watch(generation.id, generation.holder), name="holder's end")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _watch(self, generation_id: str, holder: Holder) -> None:
        error = await holder.died()
        held = self._record.generations
        if held.get(generation_id) is None:
            return  # it was let go
        log.error("a holder has died", extra={"generation": generation_id, "code": error.code, "reason": str(error)})
        if held.is_current(generation_id) or self._lose is None:
            if not self.current_lost.done():
                self.current_lost.set_result(error)
            return
        await self._lose(generation_id, error)

    async def stop(self) -> None:
        """Look no more: from now on holders end because all are let go. Safe to call twice."""
        watches = tuple(self._watches)
        for task in watches:
            task.cancel()
        if watches:
            await asyncio.wait(watches)
