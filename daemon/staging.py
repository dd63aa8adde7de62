"""A trainer's connection: from its ``Stage`` until the change that it pushes for is decided, or given up.

Owns that the two end together: a trainer that goes away, or takes longer than it said it would, gives up its change
here and nothing else, and one whose change fails is told why. Which change waits for a trainer is
``changing.py``'s to say, the worker is ``pushed.py``'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from weightcached.daemon.freeing import Freeing
from weightcached.daemon.generation import Generation
from weightcached.daemon.making import beside_what_is_held
from weightcached.daemon.pushed import PushRequest, load_pushed
from weightcached.daemon.record import Record, Tell
from weightcached.daemon.worker_process import TransientFailure
from weightcached.protocol.aio import AsyncChannel
from weightcached.protocol.control import ChangeInfo, FromTrainer
from weightcached.protocol.errors import (
    DaemonNotReady,
    InsufficientMemory,
    StageLost,
    UpdateConflict,
    WeightCacheError,
    error_from,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.messages import GiveUp, Stage, Staged
from weightcached.protocol.text import one_line

_LOADING_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


class Waiting(Protocol):
    """Changes that wait for a trainer."""

    def expected_push(self, transaction: str) -> FromTrainer: ...

    def prepare_with(
        self, transaction: str, make: Callable[[], Awaitable[Generation]]
    ) -> Coroutine[Any, Any, ChangeInfo]: ...

    def decided(self, transaction: str) -> Coroutine[Any, Any, None]: ...


class Staging:
    """Of one keeper."""

    def __init__(
        self, record: Record, changing: Waiting, freeing: Freeing, give_up: Callable[[str], Awaitable[None]]
    ) -> None:
        """``give_up`` a transaction: has the leader write down that it is aborted, where this is the leader."""
        self._record = record
        self._changing = changing
        self._freeing = freeing
        self._give_up = give_up

    async def attend(self, stage: Stage, channel: AsyncChannel, tell: Tell) -> None:
        """Attend to the trainer behind ``channel``, until its change is decided. Raises why it is not prepared; what
        sending raises; StageLost where the trainer was first to go.
        """
        source = self._changing.expected_push(stage.transaction)
        attendance = _Attendance(self._request(stage, source), self._record, channel)
        preparing = asyncio.create_task(
            self._changing.prepare_with(stage.transaction, attendance.make), name="prepare what is pushed"
        )
        try:
            await attendance.hand_over(preparing, tell)
            info = await preparing
            if info.state == "prepared":
                await self._attend_decision(stage, attendance)
        finally:
            attendance.lose("the conversation with the trainer has ended")
            preparing.cancel()  # who waits for the change, not the change
            await attendance.end()
        attendance.require_prepared(info)

    async def _attend_decision(self, stage: Stage, attendance: _Attendance) -> None:
        """All is pushed and prepared. Where the trainer goes before anything is decided, nobody is left who would."""
        deciding = asyncio.create_task(self._changing.decided(stage.transaction), name="wait for the decision")
        try:
            await _first(deciding, attendance.lost)
            if not deciding.done():
                why = attendance.lost.result()
                log.info("lost", extra={"transaction": stage.transaction, "pushed_by": stage.name, "reason": why})
                await self._give_up(stage.transaction)
        finally:
            deciding.cancel()
            await asyncio.wait({deciding})

    def _request(self, stage: Stage, source: FromTrainer) -> PushRequest:
        published = self._record.published
        if published is None:
            raise DaemonNotReady("the daemon serves nothing that could be changed")
        return PushRequest(
            base=published.generation,
            stage=stage,
            partial=source.partial,
            trusted_filesystems=self._record.options.trusted_filesystems,
            make_room=self._freeing.make_room,
        )


class _Attendance:
    """One trainer's. ``make`` runs in the change's task, the rest in the connection's."""

    def __init__(self, request: PushRequest, record: Record, channel: AsyncChannel) -> None:
        loop = asyncio.get_running_loop()
        self._request = request
        self._record = record
        self._channel = channel
        self._staged: asyncio.Future[tuple[Staged, OwnedFds]] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()
        """Why there is no trainer any more."""
        self._failure: WeightCacheError | None = None
        self._listening = asyncio.create_task(self._listen(), name="a trainer's end")
        timeout_s = request.stage.timeout_s
        self._overdue = loop.call_later(timeout_s, self.lose, f"it has not come to an end in its {timeout_s:.0f} s")

    async def _listen(self) -> None:
        try:
            frame = await self._channel.receive()
            frame.fds.close()
            if isinstance(frame.message, GiveUp):
                self.lose(f"it has given up: {one_line(frame.message.reason)}")
            self.lose(f"it said {type(frame.message).__name__}, where nothing is said any more")
        except (PeerClosed, ConnectionError):
            self.lose("its connection has ended")
        except WeightCacheError as error:
            self.lose(str(error))

    def lose(self, why: str) -> None:
        """There is no trainer any more."""
        if not self.lost.done():
            self.lost.set_result(why)

    async def make(self) -> Generation:
        """The weights, once all are pushed. Raises StageLost when the trainer is gone before."""
        loading = asyncio.create_task(
            load_pushed(self._request, self._record.progress, self._take), name="take what is pushed"
        )
        made = None
        try:
            await _first(loading, self.lost)
            if self.lost.done() and (not loading.done() or isinstance(loading.exception(), StageLost)):
                raise StageLost(
                    "the trainer went away before all was pushed",
                    expected=f"a push by {self._request.stage.name}",
                    found=self.lost.result(),
                    next_step="push again",
                )
            made = await loading
            return made
        except (TransientFailure, InsufficientMemory) as failure:
            cause = failure.cause if isinstance(failure, TransientFailure) else failure
            if isinstance(cause, InsufficientMemory):
                cause = beside_what_is_held(cause, self._record)
            self._failure = cause
            raise cause from failure
        except WeightCacheError as error:
            self._failure = error
            raise
        finally:
            if made is None:
                await _given_back(loading)

    def _take(self, staged: Staged, fds: OwnedFds) -> None:
        if self._staged.cancelled():
            fds.close()
        else:
            self._staged.set_result((staged, fds))

    async def hand_over(self, preparing: asyncio.Future[ChangeInfo], tell: Tell) -> None:
        """Send the trainer what it pushes through, once that is there; until then, that it is on its way."""
        while not self._staged.done() and not preparing.done():
            await tell(self._record.progress.current, ())
            await _first(self._staged, preparing, timeout_s=_LOADING_INTERVAL_S)
        if self._staged.done():
            staged, fds = self._staged.result()
            with fds:
                await tell(staged, [fds[position] for position in range(len(fds))])
            log.info("staged", extra={"generation": staged.generation, "pushed_by": self._request.stage.name})

    def require_prepared(self, info: ChangeInfo) -> None:
        """Raises why the change has ended otherwise."""
        if info.state in ("prepared", "committed"):
            return
        if self._failure is not None:
            raise self._failure
        if info.state == "aborted":
            raise UpdateConflict(
                "the change was given up by another coordinator while it was pushed",
                found=f"transaction {info.transaction}",
                next_step="see what is served now, and push again",
            )
        raise error_from({"code": info.error_code, "message": info.error or "the change failed"})

    async def end(self) -> None:
        """Nobody listens any more."""
        self._overdue.cancel()
        self._listening.cancel()
        await asyncio.wait({self._listening})
        if self._staged.done() and not self._staged.cancelled():
            self._staged.result()[1].close()
        self._staged.cancel()


async def _first(*waited_for: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    await asyncio.wait(waited_for, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _given_back(loading: asyncio.Task[Generation]) -> None:
    """Whatever becomes of it, no worker is left, nor what it has made."""
    loading.cancel()
    await asyncio.wait({loading})
    if not loading.cancelled() and loading.exception() is None:
        await loading.result().free()
