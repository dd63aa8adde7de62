"""A lying control plane: whoever asks at a place's command socket is answered as a test says.

    lies = frame_lies(answer, pickle_target="/dev/null")
    with LyingCommands(place.control_path, lies["another magic"], answer) as lying:
        ...  # the first question is answered with the lie, and the second with the truth
    assert lying.heard == [Describe(), Describe()]

Over real ZeroMQ sockets; imported by name, since what tests the data plane needs none of that. For tests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import zmq

from weightcached.protocol.control import CONTROL_ANSWERS, CONTROL_REQUESTS
from weightcached.protocol.control_sockets import endpoint
from weightcached.protocol.framing import decode_frame, encode_frame
from weightcached.protocol.messages import Message

Parts = Callable[[bytes, bytes], list[bytes]]
"""All that is sent, from the connection's name and the question's number, which are its first parts where it is honest;
nothing where there are none."""


class LyingCommands:
    """Bound at ``path`` for the length of a ``with`` block; the first question gets the first answer, and so on, and a
    later one none. An answer is a message, the bytes of a frame, or :data:`Parts`.

    At the end of the block every answer was asked for, or TimeoutError is raised; the socket file is gone.
    """

    def __init__(
        self, path: str | os.PathLike[str], *answers: Message | bytes | Parts, timeout_s: float = 30.0
    ) -> None:
        self.heard: list[Message] = []
        """The questions."""
        self._path = Path(path)
        self._answers = answers
        self._timeout_s = timeout_s
        self._failure: Exception | None = None
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._serve, name="lying commands")

    def __enter__(self) -> LyingCommands:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set(zmq.RCVTIMEO, int(self._timeout_s * 1000))
        try:
            self._socket.bind(endpoint(self._path))
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join()
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)
        if self._failure is not None and error is None:
            raise self._failure

    def _serve(self) -> None:
        try:
            for answer in self._answers:
                name, number, question = self._socket.recv_multipart()
                self.heard.append(decode_frame(CONTROL_REQUESTS, question))
                if parts := _parts(answer)(name, number):
                    self._socket.send_multipart(parts)
        except zmq.Again:
            self._failure = TimeoutError(f"{len(self.heard)} of {len(self._answers)} answers were asked for")
        except Exception as error:  # noqa: BLE001  # raised again in the test's own thread
            self._failure = error


def _parts(answer: Message | bytes | Parts) -> Parts:
    if isinstance(answer, Message):
        answer = encode_frame(CONTROL_ANSWERS, answer)
    if isinstance(answer, bytes):
        frame = answer
        return lambda name, number: [name, number, frame]
    return answer
