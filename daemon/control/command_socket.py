"""The socket that takes commands: receives, checks, has them carried out, answers.

Owns the limits on what is under way, and what becomes of every kind of failure. What a command means is the handler's.
Each command is a task of its own, so that one that takes an hour delays nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq

from weightcached.daemon.claim import Claim
from weightcached.daemon.control.door import Door, connection_of
from weightcached.daemon.refusals import refusal, unexpected
from weightcached.protocol.control import CONTROL_ANSWERS, CONTROL_REQUESTS, AwaitChange
from weightcached.protocol.control_channel import REQUEST_ID_BYTES
from weightcached.protocol.control_sockets import Socket, frame_max, has_message
from weightcached.protocol.errors import DaemonNotReady, ProtocolError, WeightCacheError
from weightcached.protocol.framing import decode_frame, encode_frame
from weightcached.protocol.messages import Message

UNDER_WAY_MAX = 256
UNDER_WAY_EACH_MAX = 32
"""Commands of one connection that are not answered yet."""
WAITING_MAX = UNDER_WAY_MAX // 2
"""Of those in all, the ones that merely wait: however many wait, what they wait for can be decided."""

_QUEUED_MAX = 2 * UNDER_WAY_EACH_MAX  # an answer that finds no room is lost: whoever reads has room for all of its own
_BATCH = 16
_PARTS = 3  # ZeroMQ's word for the connection, the question's number, the frame

Handler = Callable[[Message], Awaitable[Message]]

log = logging.getLogger(__name__)


class CommandSocket:
    """Serves from the start until :meth:`close`. ``handle`` raises the WeightCacheError that a command is refused
    with.
    """

    def __init__(self, context: zmq.Context[Socket], *, claim: Claim, path: Path, handle: Handler) -> None:
        self._handle = handle
        self._tasks: dict[int, set[asyncio.Task[None]]] = {}
        self._waiting: dict[int, set[asyncio.Task[None]]] = {}
        self._again: asyncio.Handle | None = None
        self._door = Door(
            context,
            zmq.ROUTER,
            claim=claim,
            path=path,
            incoming_max=frame_max(CONTROL_REQUESTS),
            queued_max=_QUEUED_MAX,
            on_ready=self._receive,
            on_left=self._left,
        )
        self._door.socket.set(zmq.ROUTER_MANDATORY, 1)  # an answer to nobody is an error, and not lost in silence
        self._door.open()

    # Receiving

    def _receive(self) -> None:
        """Some of what is there; the rest after everybody else had a turn."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        for _ in range(_BATCH):
            self._door.look()
            if not has_message(self._door.socket):
                return
            self._receive_one()
        self._again = asyncio.get_running_loop().call_soon(self._receive)

    def _receive_one(self) -> None:
        parts: list[zmq.Frame] = []
        count = 0
        while True:
            part = self._door.socket.recv(zmq.NOBLOCK, copy=False)
            count += 1
            if len(parts) < _PARTS:
                parts.append(part)
            if not part.more:
                break
        number = connection_of(part)
        # Since the last look this connection may have come, and have the number of one that has left: whose end, were
        # it heard of later, would be taken for this one's.
        self._door.look()
        if number not in self._door.connections:
            return  # nobody is there any more to be answered
        identity, request_id = parts[0].bytes, parts[1].bytes
        if count != _PARTS or len(request_id) != REQUEST_ID_BYTES:
            log.warning("not a command", extra={"parts": count})
            self._door.let_go(number)
            return
        self._begin(number, identity, request_id, parts[2].bytes)

    def _begin(self, number: int, identity: bytes, request_id: bytes, data: bytes) -> None:
        try:
            request = decode_frame(CONTROL_REQUESTS, data)
            self._require_room(number, waits=isinstance(request, AwaitChange))
        except WeightCacheError as error:
            log.warning("refused", extra={"code": error.code, "reason": str(error)})
            self._answer(identity, request_id, refusal(error))
            return
        task = asyncio.create_task(self._carry_out(identity, request_id, request), name=type(request).__name__)
        books = [self._tasks] if not isinstance(request, AwaitChange) else [self._tasks, self._waiting]
        for book in books:
            book.setdefault(number, set()).add(task)
        task.add_done_callback(lambda done: self._ended(number, done))

    def _require_room(self, number: int, *, waits: bool) -> None:
        each, in_all = len(self._tasks.get(number, ())), sum(map(len, self._tasks.values()))
        waiting = sum(map(len, self._waiting.values()))
        if waits and waiting >= WAITING_MAX:
            raise DaemonNotReady(
                "too many wait for the end of a change",
                expected=f"fewer than {WAITING_MAX}",
                found=str(waiting),
                next_step="ask again later, or ask for the state instead of waiting",
            )
        if each >= UNDER_WAY_EACH_MAX or in_all >= UNDER_WAY_MAX:
            raise DaemonNotReady(
                "too many commands are under way",
                expected=f"fewer than {UNDER_WAY_EACH_MAX} of one connection, {UNDER_WAY_MAX} in all",
                found=f"{each}, {in_all} in all",
                next_step="wait for answers",
            )

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        for book in (self._tasks, self._waiting):
            if (tasks := book.get(number)) is not None:
                tasks.discard(task)
                if not tasks:
                    del book[number]

    def _left(self, number: int) -> None:
        """Nobody waits any more; what was asked to be done is done all the same."""
        for task in self._waiting.get(number, set()):
            task.cancel()

    # Answering

    async def _carry_out(self, identity: bytes, request_id: bytes, request: Message) -> None:
        kind = type(request).__name__
        try:
            answer = await self._handle(request)
        except WeightCacheError as error:
            log.info("refused", extra={"command": kind, "code": error.code, "reason": str(error)})
            answer = refusal(error)
        except Exception as error:
            log.exception("a command met an error of ours", extra={"command": kind})
            answer = refusal(unexpected(error))
        self._answer(identity, request_id, answer)

    def _answer(self, identity: bytes, request_id: bytes, answer: Message) -> None:
        try:
            frame = encode_frame(CONTROL_ANSWERS, answer)
        except ProtocolError as error:
            log.error("an answer cannot be sent", extra={"reason": str(error)})
            frame = encode_frame(CONTROL_ANSWERS, refusal(error))
        try:
            self._door.socket.send_multipart([identity, request_id, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # gone, or it does not read: whoever wants to know asks again
            log.debug("an answer did not arrive", extra={"reason": error.strerror})
        # Sending may have used up the announcement that something else has come.
        if self._again is None:
            self._again = asyncio.get_running_loop().call_soon(self._receive)

    async def close(self) -> None:
        """End what is under way, and the socket. Whoever waits for an answer asks again, of whoever is here next."""
        tasks = {task for some in self._tasks.values() for task in some}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._again is not None:
            self._again.cancel()
        self._door.close()
