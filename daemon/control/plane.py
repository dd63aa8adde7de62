"""The control plane of one keeper: both sockets, from their imports to their end.

Owns bringing them up beside the keeper's life, after adoption, and trying again where they cannot be had: weights are
served without them. What commands mean is the handler's, what happens is said by ``events.py``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from weightcached.daemon.claim import Claim
from weightcached.daemon.endpoint import RETRY_FIRST_S, RETRY_MAX_S, let_adoption_go_first
from weightcached.daemon.patience import in_thread
from weightcached.daemon.record import Record
from weightcached.daemon.refusals import unexpected
from weightcached.protocol.errors import WeightCacheError

if TYPE_CHECKING:
    from weightcached.daemon.control.command_socket import Handler
    from weightcached.daemon.control.sockets import Sockets

log = logging.getLogger(__name__)


class ControlPlane:
    """From :meth:`start` until :meth:`close`, while ``claim`` is held."""

    def __init__(self, record: Record, claim: Claim, handle: Handler) -> None:
        self._record = record
        self._claim = claim
        self._handle = handle
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Come up, in the background."""
        self._task = asyncio.create_task(self._run(), name="control plane")

    async def _run(self) -> None:
        await let_adoption_go_first(self._record)
        try:
            await in_thread(_import)
            sockets = await self._open()
            try:
                log.info("control plane", extra={"commands": str(self._claim.place.control_path)})
                await asyncio.Event().wait()
            finally:
                await sockets.close()
        except Exception as error:
            log.exception("the control plane met an error of ours: weights are served without it")
            self._record.last_error = unexpected(error)

    async def _open(self) -> Sockets:
        from weightcached.daemon.control.sockets import Sockets, ZmqError

        delay_s = 0.0
        while True:
            try:
                return Sockets(self._record.events, self._claim, self._handle)
            except (WeightCacheError, ZmqError) as error:
                if not delay_s:
                    log.error("the control plane cannot be had: trying again", extra={"reason": str(error)})
                delay_s = min(RETRY_MAX_S, 2 * delay_s or RETRY_FIRST_S)
                await asyncio.sleep(delay_s)

    async def close(self) -> None:
        """Answer and tell no more; the sockets' files go. Safe to call without :meth:`start`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._claim.unlink_beside()


def _import() -> None:
    """What is not needed before the keeper has bound its socket, in a thread so that no client waits."""
    import weightcached.daemon.control.sockets  # noqa: F401
