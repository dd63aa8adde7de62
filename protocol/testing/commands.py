"""A lying control plane: whoever asks at a place's command socket is answered as a test says.

    lies = frame_lies(answer, pickle_target="/dev/null")
    with LyingCommands(place.control_path, lies["another magic"], answer) as lying:
        ...  # the first question is answered with the lie, and the second with the truth
    assert lying.heard == [Describe(), Describe()]

Over real ZeroMQ sockets; imported by name, since what tests the data plane needs none of that. For tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import zmq

from weightcached.protocol.control import CONTROL_ANSWERS, CONTROL_REQUESTS
from weightcached.protocol.framing import decode_frame, encode_frame
from weightcached.protocol.messages import Message
from weightcached.protocol.testing.plane import LyingPlane

Parts = Callable[[bytes, bytes], list[bytes]]
"""All that is sent, from the connection's name and the question's number, which are its first parts where it is honest;
nothing where there are none."""


class LyingCommands(LyingPlane):
    """Bound at ``path`` for the length of a ``with`` block; the first question gets the first answer, and so on, and a
    later one none. An answer is a message, the bytes of a frame, or :data:`Parts`.

    At the end of the block every answer was asked for, or TimeoutError is raised; the socket file is gone.
    """

    _kind = zmq.ROUTER

    def __init__(
        self, path: str | os.PathLike[str], *answers: Message | bytes | Parts, timeout_s: float = 30.0
    ) -> None:
        super().__init__(path, timeout_s=timeout_s)
        self.heard: list[Message] = []
        """The questions."""
        self._answers = answers

    def _follow_script(self) -> None:
        for answer in self._answers:
            name, number, question = self._socket.recv_multipart()
            self.heard.append(decode_frame(CONTROL_REQUESTS, question))
            if parts := _parts(answer)(name, number):
                self._socket.send_multipart(parts)

    def _what_is_left(self) -> str:
        return f"{len(self.heard)} of {len(self._answers)} answers were asked for"


def _parts(answer: Message | bytes | Parts) -> Parts:
    if isinstance(answer, Message):
        answer = encode_frame(CONTROL_ANSWERS, answer)
    if isinstance(answer, bytes):
        frame = answer
        return lambda name, number: [name, number, frame]
    return answer
