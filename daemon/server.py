"""The listening socket: accepts clients, gives each a task of its own, and ends them all in the end.

Owns the accept loop (with its back-off when descriptors run out), the limit on connections, and draining. What is said
on a connection is ``connection.py``'s. The listener is handed in bound and listening, and is closed here.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from weightcached.daemon.connection import Connection, say_at_once
from weightcached.daemon.quota import Quota
from weightcached.daemon.record import Record
from weightcached.daemon.refusals import refusal
from weightcached.protocol.errors import DaemonDraining, DaemonNotReady
from weightcached.protocol.messages import Event, Refused
from weightcached.protocol.peers import peer_of

_ACCEPTS_PER_WAKE = 32
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 1.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger(__name__)


class Server:
    """Accepts on ``listener`` from :meth:`start` until :meth:`close`."""

    def __init__(self, listener: socket.socket, record: Record) -> None:
        self._listener = listener
        self._record = record
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._backoff_s = 0.0
        self._resume: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._resume = None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKE):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._back_off(error)
                    return
                log.warning("a client was gone before it was accepted", extra={"reason": str(error)})
                continue
            if self._backoff_s:
                log.info("accepting again")
                self._backoff_s = 0.0
            self._admit(accepted)

    def _back_off(self, error: OSError) -> None:
        """The waiting client keeps the listener readable: without a pause this would spin."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        if not self._backoff_s:
            log.error(
                "cannot accept: clients wait", extra={"reason": str(error), "connections": len(self._connections)}
            )
        self._backoff_s = min(_BACKOFF_MAX_S, 2 * self._backoff_s or _BACKOFF_FIRST_S)
        self._resume = loop.call_later(self._backoff_s, self.start)

    def _admit(self, accepted: socket.socket) -> None:
        quota, uid = self._record.limits.connections, peer_of(accepted).uid
        if not quota.take(uid):
            self._record.attaches[DaemonNotReady.code] += 1
            _turn_away(accepted, _too_many(quota, uid))
            return
        connection = Connection(accepted, self._record)
        task = asyncio.create_task(connection.serve(), name=f"connection of {connection.peer}")
        self._connections[task] = connection
        task.add_done_callback(lambda done: self._ended(done, uid))

    def _ended(self, task: asyncio.Task[None], uid: int) -> None:
        del self._connections[task]
        self._record.limits.connections.give(uid)

    def tell(self, event: Event) -> None:
        """Say ``event`` on every lease."""
        for connection in list(self._connections.values()):
            connection.tell(event)

    async def drain(self) -> None:
        """End every connection on which nothing is under way, leases included, and wait for the others to be answered.

        The record's state is ``draining`` by now, so a connection ends itself once it has answered. Cancelled, this
        leaves those that are still busy to :meth:`close`.
        """
        while busy := self._end_idle():
            await asyncio.wait(busy)

    def _end_idle(self) -> set[asyncio.Task[None]]:
        busy = set()
        for task, connection in self._connections.items():
            if connection.busy:
                busy.add(task)
            else:
                connection.dismiss(_draining())
                task.cancel()
        return busy

    async def close(self, *, refuse_backlog: bool = True) -> None:
        """Take no more clients, and end every connection that is left. Those in the backlog are told, or left to
        whoever else holds the listener.
        """
        if self._resume is not None:
            self._resume.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        if refuse_backlog:
            self._refuse_backlog()
        self._listener.close()
        tasks = set(self._connections)
        for task, connection in list(self._connections.items()):
            connection.dismiss(_draining())
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _refuse_backlog(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # nobody is left there, or there is no descriptor to tell them with
                return
            _turn_away(accepted, _draining())


def _turn_away(accepted: socket.socket, refused: Refused) -> None:
    with accepted:
        accepted.setblocking(False)
        say_at_once(accepted, refused)


def _too_many(quota: Quota, uid: int) -> Refused:
    one_user = quota.used_by(uid) >= quota.each
    return refusal(
        DaemonNotReady(
            "this user has as many connections as one may have"
            if one_user
            else "the daemon has as many connections as it takes",
            expected=f"fewer than {quota.each if one_user else quota.in_all}",
            found=f"{quota.used_by(uid)} of uid {uid}, {quota.used} in all",
            next_step="try again when engines have left, or raise "
            + ("--connections-per-uid-max" if one_user else "--connections-max"),
        )
    )


def _draining() -> Refused:
    return refusal(
        DaemonDraining("the daemon is stopping", next_step="start the engine again when a daemon serves this place")
    )
