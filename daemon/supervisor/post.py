"""What the keeper says, read from the mailbox: checked, acted upon where it is about descriptors, else handed on.

Owns refusing (whoever is not the keeper, whatever is cut or makes no sense), keeping and removing, and answering the
question what is kept. Every received descriptor is kept or closed on every path. Nothing here blocks.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator

from weightcached.daemon.notify_protocol import BadDatagram, Notification, decode
from weightcached.daemon.supervisor.mailbox import Datagram, Mailbox
from weightcached.daemon.supervisor.store import Outcome, Store
from weightcached.protocol.fds import OwnedFds

_REFUSALS_LOGGED_EVERY_S = 1.0
_NOBODY = -1
_PIPE_NBYTES = 64 * 1024
"""What a new pipe holds."""

log = logging.getLogger(__name__)


class Post:
    """Reads ``mailbox`` and fills ``store``."""

    def __init__(self, mailbox: Mailbox, store: Store) -> None:
        self._mailbox = mailbox
        self._store = store
        self._refused = 0
        self._refusal_logged_s: float | None = None

    @property
    def address(self) -> str:
        """What the keeper finds in ``NOTIFY_SOCKET``."""
        return str(self._mailbox.path)

    def fileno(self) -> int:
        return self._mailbox.fileno()

    def read(self, keeper_pid: int, limit: int) -> Iterator[Notification]:
        """Up to ``limit`` datagrams that are there now: each that ``keeper_pid`` sent, after it was acted upon."""
        for _ in range(limit):
            datagram = self._mailbox.receive()
            if datagram is None:
                return
            # A barrier asks for nothing but that its descriptor be closed, now that all before it is done.
            with datagram.fds:
                said = self._understand(datagram, keeper_pid)
                if said is not None:
                    self._act(said, datagram.fds)
            if said is not None:
                yield said

    def refuse_all(self, limit: int) -> None:
        """As :meth:`read` while there is no keeper."""
        for _ in self.read(_NOBODY, limit):
            pass

    def _understand(self, datagram: Datagram, keeper_pid: int) -> Notification | None:
        if datagram.sender_pid != keeper_pid:
            reason = "not from the keeper"
        elif datagram.cut:
            reason = "too large, or no room here for its descriptors"
        else:
            try:
                return decode(datagram.data, descriptors=len(datagram.fds))
            except BadDatagram as error:
                reason = str(error)
        self._refuse(datagram.sender_pid, reason)
        return None

    def _refuse(self, sender_pid: int, reason: str) -> None:
        """One line a second at most: whoever sends what is refused may send a lot of it."""
        self._refused += 1
        now_s = time.monotonic()
        if self._refusal_logged_s is None or now_s - self._refusal_logged_s >= _REFUSALS_LOGGED_EVERY_S:
            self._refusal_logged_s = now_s
            fields = {"sender_pid": sender_pid, "reason": reason, "refused_so_far": self._refused}
            log.warning("refused a datagram", extra=fields)

    def _act(self, said: Notification, fds: OwnedFds) -> None:
        if said.store:
            self._keep(said.name, fds)
        elif said.remove:
            count = self._store.remove(said.name)
            log.info("removed", extra={"fd_name": said.name, "count": count, "kept": len(self._store)})
        elif said.kept_query:
            self._answer(fds[0])

    def _keep(self, name: str, fds: OwnedFds) -> None:
        for position in range(len(fds)):
            outcome = self._store.add(name, fds, position)
            fields = {"fd_name": name, "outcome": outcome.value, "kept": len(self._store)}
            if outcome is Outcome.FULL:
                log.error("dropped a descriptor: raise --store-max", extra=fields | {"store_max": self._store.limit})
            else:
                log.debug("descriptor", extra=fields)

    def _answer(self, pipe: int) -> None:
        """Write the names into the keeper's pipe. It may take fewer, or none: an answer that is cut says less is kept
        than is, never more.
        """
        text = "".join(f"{name}\n" for name in self._store.names).encode()
        try:
            fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK)
            if len(text) > _PIPE_NBYTES:
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, len(text))
            written = os.write(pipe, text) if text else 0
        except OSError as error:
            log.error("the question what is kept cannot be answered", extra={"reason": error.strerror})
            return
        if written < len(text):
            log.error("the answer what is kept was cut", extra={"nbytes": len(text), "written_nbytes": written})
