"""A lying event socket: whoever listens at a place is told what a test says, in answer to its asking for a snapshot.

    lies = frame_lies(event, pickle_target="/dev/null")
    with LyingEvents(place.events_path, [snapshot, lies["another magic"]], [snapshot, event]) as lying:
        ...  # the first that asks hears a snapshot and then the lie, the second one the truth
    assert len(lying.topics) == 2

Over real ZeroMQ sockets, as ``commands.py``. For tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import zmq

from weightcached.protocol.control import CONTROL_EVENTS, EVENTS_TOPIC, ControlEvent
from weightcached.protocol.framing import encode_frame
from weightcached.protocol.testing.plane import LyingPlane

Parts = Callable[[bytes], list[bytes]]
"""All that is sent, from the topic that the listener has for itself; the topic is the first part where it is honest."""

_SUBSCRIBED = b"\x01"


class LyingEvents(LyingPlane):
    """Bound at ``path`` for the length of a ``with`` block; the first that asks for a snapshot is told all of the first
    script, and so on, and a later one nothing. A listener that has missed events asks again, and counts again.

    What is told is an event (a ``snapshot`` on the listener's own topic, any other on that of all), the bytes of a
    frame, which goes to the listener alone, or :data:`Parts`. A script that is empty is silence. At the end of the
    block every script was asked for, or TimeoutError is raised; the socket file is gone.
    """

    _kind = zmq.XPUB

    def __init__(
        self, path: str | os.PathLike[str], *scripts: Sequence[ControlEvent | bytes | Parts], timeout_s: float = 30.0
    ) -> None:
        super().__init__(path, timeout_s=timeout_s)
        self.topics: list[bytes] = []
        """Of those who asked."""
        self._scripts = scripts

    def _follow_script(self) -> None:
        self._socket.set(zmq.XPUB_VERBOSE, 1)
        for script in self._scripts:
            topic = self._asked()
            self.topics.append(topic)
            for told in script:
                self._socket.send_multipart(_parts(told)(topic))

    def _asked(self) -> bytes:
        """The own topic of whoever asks next."""
        while True:
            said = self._socket.recv()
            if said[:1] == _SUBSCRIBED and said[1:] != EVENTS_TOPIC:
                return said[1:]

    def _what_is_left(self) -> str:
        return f"{len(self.topics)} of {len(self._scripts)} scripts were asked for"


def _parts(told: ControlEvent | bytes | Parts) -> Parts:
    if isinstance(told, ControlEvent):
        own, data = told.kind == "snapshot", encode_frame(CONTROL_EVENTS, told)
        return lambda topic: [topic if own else EVENTS_TOPIC, data]
    if isinstance(told, bytes):
        frame = told
        return lambda topic: [topic, frame]
    return told
