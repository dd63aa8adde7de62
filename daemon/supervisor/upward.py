"""What our own service manager is told, where there is one: the keeper's state, passed on, and our own signs of life.

Owns the connection to our ``NOTIFY_SOCKET`` and what could not be said yet. Descriptors are not passed on. The
manager's watchdog is for this process: a keeper that hangs or is being started again costs a restart of the keeper, and
must never cost the vault, which would go with us.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

from weightcached.daemon.notify_protocol import encode, socket_address, watchdog_interval_s
from weightcached.protocol.errors import ManagerUnreachable

log = logging.getLogger(__name__)


class Upward:
    """Says ``fields`` as soon as there is room; of each the last that was said counts. Without a manager, to nobody."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises InvalidEnvironment or ManagerUnreachable."""
        self.watchdog_s: float | None = None
        self._connection: socket.socket | None = None
        self._unsaid: dict[str, str] = {}
        text = environment.get("NOTIFY_SOCKET")
        if text is None:
            return
        self.watchdog_s = watchdog_interval_s(environment, pid=os.getpid())
        address = socket_address(text)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._connection.connect(address)
        except OSError as error:
            self._connection.close()
            raise ManagerUnreachable(
                "the service manager that started this process cannot be reached", found=error.strerror, where=text
            ) from error

    @property
    def waiting_fd(self) -> int | None:
        """The descriptor to poll for room, while something is unsaid."""
        return self._connection.fileno() if self._connection is not None and self._unsaid else None

    def say(self, fields: Mapping[str, str]) -> None:
        """Now if there is room, else later. Does not block."""
        if self._connection is not None:
            self._unsaid.update(fields)
            self.flush()

    def flush(self) -> None:
        """Say what is unsaid, if there is room."""
        if self._connection is None or not self._unsaid:
            return
        try:
            self._connection.send(encode(self._unsaid))
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("the service manager was not told", extra={"reason": error.strerror, **_words(self._unsaid)})
        self._unsaid.clear()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _words(fields: Mapping[str, str]) -> dict[str, object]:
    return {"unsaid": " ".join(fields)}
