"""Hearing what happens at one place: first what things are like, then every event, and a word where some were missed.

Owns a connection to a daemon's events, the order of what it says, and coming back to a daemon that was started again.
Needs an event loop. Whoever hears too slowly misses events, never the newest: the gap in the sequence shows it, and a
new snapshot is asked for then.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from weightcached.protocol.control import CONTROL_EVENTS, EVENTS_TOPIC, ControlEvent
from weightcached.protocol.control_channel import PATIENCE_S, look
from weightcached.protocol.control_sockets import end, endpoint, frame_max, has_message, limit, readable
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonNotReady,
    DaemonUnreachable,
    ProtocolError,
    UntrustedClient,
    WeightCacheError,
)
from weightcached.protocol.framing import decode_frame
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place

_PAUSE_S = 0.1
_QUEUED_MAX = 1000
_NOBODY = AllowList()
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_WATCHED = _GONE | zmq.EVENT_HANDSHAKE_SUCCEEDED


@dataclass(frozen=True, slots=True)
class Heard:
    """One event, after ``missed`` others that did not arrive."""

    event: ControlEvent
    missed: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """Nobody tells anything at this place any more, or not yet, and why."""

    place: Place
    reason: WeightCacheError


class Listener:
    """A connection to the events of ``place``'s daemon; an async context manager.

    Entering it raises what :func:`look` finds: DaemonAbsent, DaemonUnreachable, DaemonNotReady, UntrustedDaemon,
    UntrustedClient or InvalidPlace.
    """

    def __init__(self, place: Place, *, allowed: AllowList = _NOBODY) -> None:
        self._place = place
        self._allowed = allowed
        self._own_topic = b""
        self._last: int | None = None
        self._greeted = False

    async def __aenter__(self) -> Listener:
        path = self._place.events_path
        peer, missing = look(self._place, path, self._allowed)
        if missing is not None:
            raise missing
        self._admitted = peer is not None and os.geteuid() in (0, peer.uid)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        limit(self._socket, incoming_max=frame_max(CONTROL_EVENTS), queued_max=_QUEUED_MAX)
        self._socket.set(zmq.RECONNECT_IVL, -1)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._socket.subscribe(EVENTS_TOPIC)
        self._ask_snapshot()
        self._socket.connect(endpoint(path))
        return self

    def _ask_snapshot(self) -> None:
        """Another topic of our own, and what was said on the last one is of no interest any more."""
        if self._own_topic:
            self._socket.unsubscribe(self._own_topic)
        self._own_topic = b"s" + secrets.token_hex(16).encode()
        self._socket.subscribe(self._own_topic)

    async def hear(self, timeout_s: float | None = None) -> Heard | None:
        """The next event; the first is a ``snapshot``. ``None`` when the time is over first.

        Raises DaemonUnreachable when the daemon has gone, UntrustedClient where it does not let us in, ProtocolError
        for what is no event.
        """
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        while True:
            if has_message(self._socket):
                if (heard := self._heard()) is not None:
                    return heard
            elif has_message(self._monitor):
                self._look_at_connection()
            elif deadline is not None and deadline.passed:
                return None
            else:
                await readable((self._socket, self._monitor), None if deadline is None else deadline.remaining_s())

    async def begin(self, timeout_s: float) -> Heard:
        """The first event, the ``snapshot``. Raises as :meth:`hear`, and DaemonNotReady where it does not come."""
        heard = await self.hear(timeout_s)
        if heard is None:
            raise DaemonNotReady(
                "the daemon took the connection and tells nothing",
                expected=f"what things are like, within {timeout_s:g} s",
                found="nothing",
                where=self._place.events_path,
                next_step="look whether the daemon is stopped or starved (`weightcached status`, `ps`)",
            )
        return heard

    def _look_at_connection(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greeted = True
        elif has_message(self._socket):
            return  # its last words first; that it is gone is found once more when they are heard
        elif self._greeted or self._admitted:
            raise DaemonUnreachable("the daemon went away", where=self._place.events_path)
        else:
            raise UntrustedClient(
                "the daemon tells its events to root and its own user only",
                found=f"uid {os.geteuid()}",
                where=self._place.events_path,
                next_step="run this as the daemon's user; an engine hears of new weights on its lease",
            )

    def _heard(self) -> Heard | None:
        parts = self._socket.recv_multipart(zmq.NOBLOCK)
        try:
            event = self._event(parts)
        except ProtocolError as error:
            error.where = f"{error.where or 'what it told'} at {self._place.events_path}"
            error.next_step = error.next_step or "see which program listens there, and use the daemon's release here"
            raise
        if parts[0] == self._own_topic and event.kind == "snapshot":
            self._last = event.sequence
            return Heard(event)
        if parts[0] != EVENTS_TOPIC or self._last is None:
            return None  # said before the first snapshot, which includes it
        missed = max(0, event.sequence - self._last - 1)
        self._last = event.sequence
        if missed:
            self._ask_snapshot()
        return Heard(event, missed)

    def _event(self, parts: list[bytes]) -> ControlEvent:
        if len(parts) != 2:
            raise ProtocolError("not an event", expected="a topic and a frame", found=f"{len(parts)} parts")
        event = decode_frame(CONTROL_EVENTS, parts[1])
        if not isinstance(event, ControlEvent):
            raise ProtocolError("not an event", found=type(event).__name__)
        if event.place != str(self._place):
            raise ProtocolError("an event of another place", expected=str(self._place), found=event.place)
        return event

    async def __aexit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        end(self._context)


async def follow(
    place: Place, *, allowed: AllowList = _NOBODY, until_gone: bool = False
) -> AsyncGenerator[Heard | Lost, None]:
    """Everything that happens at ``place``, from now on, whoever is its daemon: after each start a snapshot first.

    Says :class:`Lost` each time nobody is there any more, and waits for the next daemon; with ``until_gone`` it ends
    once there are no weights at the place. Raises what waiting does not mend: UntrustedDaemon, UntrustedClient,
    InvalidPlace, ProtocolError.
    """
    lost: type[WeightCacheError] | None = None
    while True:
        try:
            async with Listener(place, allowed=allowed) as listener:
                heard: Heard | None = await listener.begin(PATIENCE_S)
                lost = None
                while heard is not None:
                    yield heard
                    heard = await listener.hear()
        except (DaemonAbsent, DaemonUnreachable, DaemonNotReady) as error:
            if type(error) is not lost:
                yield Lost(place, error)
            lost = type(error)
            if until_gone and isinstance(error, DaemonAbsent):
                return
        await asyncio.sleep(_PAUSE_S)  # nothing announces a socket
