"""What lying sockets of the control plane have in common: bound at a path, a thread that follows a script, and its end.

Owns their lifetime. What is said is ``commands.py``'s and ``events.py``'s business. For tests.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from weightcached.protocol.control_sockets import endpoint


class LyingPlane(ABC):
    """Bound at ``path`` for the length of a ``with`` block. At the end of the block the script is over, or what it met
    is raised: TimeoutError where nobody has asked for all of it. The socket file is gone then.
    """

    _kind: int
    """Of ZeroMQ."""

    def __init__(self, path: str | os.PathLike[str], *, timeout_s: float) -> None:
        self._path = Path(path)
        self._timeout_s = timeout_s
        self._failure: Exception | None = None
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._serve, name="a lying plane")

    def __enter__(self) -> Self:
        self._socket: zmq.Socket[Any] = self._context.socket(self._kind)
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
            self._follow_script()
        except zmq.Again:
            self._failure = TimeoutError(self._what_is_left())
        except Exception as error:  # noqa: BLE001  # raised again in the test's own thread
            self._failure = error

    @abstractmethod
    def _follow_script(self) -> None: ...

    @abstractmethod
    def _what_is_left(self) -> str: ...
