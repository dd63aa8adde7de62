"""What the service manager is told about the keeper's life: ready, stopping, what is going on, that the loop turns.

Owns the tasks that tell it. Nothing depends on its listening: what cannot be said is logged, and the keeper goes on.
What the manager keeps for us is the vault's business (``vault.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, NoReturn

from weightcached.daemon.notify import Notifier
from weightcached.daemon.record import Record
from weightcached.daemon.states import SERVING, State
from weightcached.daemon.text import binary_size
from weightcached.protocol.errors import ManagerUnreachable
from weightcached.protocol.messages import Loading

STATUS_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


class Signs:
    """From :meth:`start` until :meth:`close`. Without a ``notifier``, to nobody."""

    def __init__(self, notifier: Notifier | None, record: Record) -> None:
        self._notifier = notifier
        self._record = record
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Tell from now on what is going on, and that the event loop turns if the manager wants to know."""
        if self._notifier is None:
            return
        self._tasks = {asyncio.create_task(self._tell_status(self._notifier), name="status")}
        if self._notifier.watchdog_s is not None:
            self._tasks.add(asyncio.create_task(self._notifier.give_signs_of_life(), name="watchdog"))

    async def settled(self) -> None:
        """The keeper answers for good now: with weights, or with the reason why there are none.

        Also where it has failed: units that wait for this one go on and ask it, and are told why, instead of waiting
        for ever.
        """
        if self._notifier is not None:
            await _said(self._notifier.ready(status_of(self._record)))

    async def stopping(self) -> None:
        if self._notifier is not None:
            await _said(self._notifier.stopping(status_of(self._record)))

    async def _tell_status(self, notifier: Notifier) -> NoReturn:
        told = ""
        while True:
            text = status_of(self._record)
            if text != told and notifier.say_status(text):
                told = text
            await self._record.changes.wait(STATUS_INTERVAL_S)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _said(saying: Coroutine[Any, Any, None]) -> None:
    try:
        await saying
    except ManagerUnreachable as error:
        log.warning("the service manager was not told", extra={"reason": str(error)})


def status_of(record: Record) -> str:
    """The state in one line."""
    progress = record.progress.current
    if record.state in SERVING and record.published is not None:
        text = f"{record.state}: {binary_size(record.published.generation.resident_nbytes)}"
        text += f", {len(record.leases)} leases" if len(record.leases) != 1 else ", 1 lease"
        if record.published.unproven is not None:
            text += f"; unproven: {record.published.unproven}"
        if record.custody is not None:
            keeping = record.custody.keeping(record.published.generation.id)
            text += f"; vault: {keeping.state}" if keeping.state != "kept" else ""  # `weightcached status` says why
        if record.state is State.UPDATING:
            text += f"; {_stage(progress)}"
        return text
    if record.state is State.FAILED:
        return f"failed: {record.last_error}"
    if record.state in (State.DRAINING, State.STOPPED):
        return str(record.state)
    return f"{record.state}: {_stage(progress)}"


def _stage(progress: Loading) -> str:
    if not progress.bytes_total:
        return progress.stage
    percent = 100 * progress.bytes_done / progress.bytes_total
    return f"{progress.stage} {percent:.0f}% at {binary_size(progress.bytes_per_s)}/s"
