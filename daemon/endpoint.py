"""The keeper's own metrics endpoint, where ``--metrics-address`` asks for one.

Owns its life beside the keeper's: it comes up after the weights do, or soon, and can fail without them. An address that
cannot be had is said in the log and tried again; weights are served all the same.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from weightcached.daemon.patience import in_thread
from weightcached.daemon.record import Record
from weightcached.daemon.refusals import unexpected
from weightcached.daemon.snapshot import report
from weightcached.daemon.states import State
from weightcached.protocol.deadline import Deadline

if TYPE_CHECKING:
    from weightcached.daemon.address import Address
    from weightcached.daemon.http import HttpServer

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
_ADOPTION_FIRST_S = 2.0

log = logging.getLogger(__name__)


class Endpoint:
    """From :meth:`start` until :meth:`close`; without an ``address``, nothing at all."""

    def __init__(self, address: Address | None, record: Record) -> None:
        self._address = address
        self._record = record
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve, in the background."""
        if self._address is not None:
            self._task = asyncio.create_task(self._run(self._address), name="metrics")

    async def _run(self, address: Address) -> None:
        await let_adoption_go_first(self._record)
        try:
            server = await in_thread(self._make)
            try:
                await self._listen(server, address)
                await asyncio.Event().wait()
            finally:
                await server.close()
        except Exception as error:
            log.exception("metrics met an error of ours: weights are served without them")
            self._record.last_error = unexpected(error)

    def _make(self) -> HttpServer:
        """Imports what is not needed before the keeper has bound its socket, in a thread so that no client waits."""
        from weightcached.daemon.http import HttpServer
        from weightcached.daemon.pages import Snapshot
        from weightcached.daemon.seen import Seen

        async def snapshot() -> Snapshot:
            return Snapshot((Seen(self._record.options.place, report=report(self._record)),))

        return HttpServer(snapshot)

    async def _listen(self, server: HttpServer, address: Address) -> None:
        delay_s = 0.0
        while True:
            try:
                bound = await server.start(address)
            except OSError as error:
                if not delay_s:
                    extra = {"address": str(address), "reason": str(error)}
                    log.error("metrics cannot be served at this address: trying again", extra=extra)
                delay_s = min(RETRY_MAX_S, 2 * delay_s or RETRY_FIRST_S)
                await asyncio.sleep(delay_s)
            else:
                log.info("metrics", extra={"address": str(bound)})
                return

    async def close(self) -> None:
        """Serve no more. Safe to call without :meth:`start`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


async def let_adoption_go_first(record: Record) -> None:
    """Engines that wait for weights which are here already must not wait for imports."""
    deadline = Deadline.after(_ADOPTION_FIRST_S)
    while record.state in (State.STARTING, State.ADOPTING) and not deadline.passed:
        await record.changes.wait(deadline.remaining_s())
