"""The socket that tells events: to whoever listens, and to each new listener first what things are like.

Owns topics and what a listener may subscribe to. A listener subscribes to ``e``, where every event is said, and then to
a topic of its own, ``s`` and 32 hexadecimal digits: that has a ``snapshot`` said there, with the sequence number of the
last event before it. Whoever reads too slowly misses events and sees it by the number; another topic of its own gives
it another snapshot. Whatever anybody sends or does not read, nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path

import zmq

from weightcached.daemon.claim import Claim
from weightcached.daemon.control.door import Door, connection_of
from weightcached.protocol.control import (
    CONTROL_EVENTS,
    EVENTS_TOPIC,
    SUBSCRIPTION_MAX_BYTES,
    SUBSCRIPTIONS_MAX,
    ControlEvent,
)
from weightcached.protocol.control_sockets import Socket, has_message
from weightcached.protocol.errors import ProtocolError
from weightcached.protocol.framing import encode_frame

QUEUED_MAX = 512
"""Events that wait for one listener, beside what the kernel takes."""

_BATCH = 16
_OWN_TOPIC = re.compile(rb"s[0-9a-f]{32}")

log = logging.getLogger(__name__)


class EventSocket:
    """Tells from the start until :meth:`close`. ``snapshot`` makes what a new listener is told first."""

    def __init__(
        self, context: zmq.Context[Socket], *, claim: Claim, path: Path, snapshot: Callable[[], ControlEvent]
    ) -> None:
        self._snapshot = snapshot
        self._topics: dict[int, set[bytes]] = {}
        self._again: asyncio.Handle | None = None
        self._door = Door(
            context,
            zmq.XPUB,
            claim=claim,
            path=path,
            incoming_max=SUBSCRIPTION_MAX_BYTES,
            queued_max=QUEUED_MAX,
            on_ready=self._receive,
            on_left=self._left,
        )
        self._door.socket.set(zmq.XPUB_VERBOSER, 1)  # or a topic that another has already would not be heard of
        self._door.open()

    @property
    def has_listeners(self) -> bool:
        """Whether anybody is there; false may be some milliseconds old."""
        return bool(self._topics)

    def tell(self, event: ControlEvent) -> None:
        """Say ``event`` to everybody who listens."""
        self._say(EVENTS_TOPIC, event)

    def _say(self, topic: bytes, event: ControlEvent) -> None:
        try:
            frame = encode_frame(CONTROL_EVENTS, event)
        except ProtocolError as error:
            log.error("an event cannot be said", extra={"kind": event.kind, "reason": str(error)})
            return
        self._door.socket.send_multipart([topic, frame], zmq.NOBLOCK)
        self._soon()  # sending may have used up the announcement that somebody has come

    def _soon(self) -> None:
        if self._again is None:
            self._again = asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        """Some of who has come and gone; the rest after everybody else had a turn."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        for _ in range(_BATCH):
            self._door.look()
            if not has_message(self._door.socket):
                return
            part = self._door.socket.recv(zmq.NOBLOCK, copy=False)
            self._door.look()  # whose it is may have come since, with the number of one that has left
            self._subscribed(connection_of(part), part.bytes, alone=not part.more)
        self._soon()

    def _subscribed(self, number: int, said: bytes, *, alone: bool) -> None:
        if number not in self._door.connections:
            return
        topics = self._topics.setdefault(number, set())
        topic = said[1:]
        if said[:1] == b"\0":
            topics.discard(topic)
            return
        own = _OWN_TOPIC.fullmatch(topic) is not None
        if said[:1] != b"\1" or not alone or not (own or topic == EVENTS_TOPIC) or len(topics) >= SUBSCRIPTIONS_MAX:
            log.warning("not a subscription", extra={"found": ascii(said[:64]), "subscriptions": len(topics)})
            self._door.let_go(number)
            return
        topics.add(topic)
        if own:
            self._say(topic, self._snapshot())

    def _left(self, number: int) -> None:
        self._topics.pop(number, None)

    def close(self) -> None:
        """Tell nobody any more, and end every connection."""
        if self._again is not None:
            self._again.cancel()
        self._door.close()
