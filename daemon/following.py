"""A rank that has something prepared reads the decision where it is written: in the record of rank 0, the leader.

Owns asking, again and again with a pause that grows, until the change is decided; and asking at once when somebody
needs to know. Nothing is decided here, and nothing is assumed from silence: a rank whose leader does not answer serves
what it serves, and holds what it holds. The leader itself has nobody to ask.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from weightcached.daemon.changing import Changing
from weightcached.protocol.control import Decided, ReadDecision
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.messages import Message
from weightcached.protocol.places import Place

PAUSE_FIRST_S = 0.2
PAUSE_MAX_S = 10.0
ANSWER_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer", bound=Message)


class Ask(Protocol):
    """Asks the daemon of a place on the control plane; ``control_channel.ask``."""

    def __call__(
        self, place: Place, request: Message, answer: type[_Answer], *, deadline: Deadline
    ) -> Awaitable[_Answer]: ...


class Following:
    """For one place that is no leader. From :meth:`start` until :meth:`stop`."""

    def __init__(self, place: Place, changing: Changing, ask: Ask) -> None:
        self._place = place
        self._changing = changing
        self._ask = ask
        self._at_once = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow the change that is under way here until it is over. Nothing, where this is done already."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="follow the leader")

    def look_soon(self) -> None:
        """Somebody waits for the decision."""
        self._at_once.set()

    @property
    def _is_over(self) -> bool:
        info = self._changing.info
        return info is None or info.state not in ("preparing", "prepared")

    async def _run(self) -> None:
        pause_s, told = PAUSE_FIRST_S, ""
        while not self._is_over:
            self._at_once.clear()
            try:
                await self.look()
            except WeightCacheError as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("the leader's decision is not known yet", extra={"code": error.code, "reason": told})
            except Exception:  # this rank must go on asking: nobody else tells it what was decided
                log.exception("reading the leader's decision met an error of ours")
            if self._is_over:
                return
            try:
                async with asyncio.timeout(pause_s):
                    await self._at_once.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def look(self) -> None:
        """Read the leader's record once, and act upon it. Raises why it could not be read, or not be acted upon."""
        info = self._changing.info
        if info is None or self._is_over:
            return
        leader = Place(self._place.runtime_dir, self._place.name, info.leader)
        decided = await self._ask(
            leader,
            ReadDecision(transaction=info.transaction),
            Decided,
            deadline=Deadline.after(ANSWER_TIMEOUT_S),
        )
        await self._changing.act(decided.decision)

    async def stop(self) -> None:
        """Follow no more. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
