"""One ZeroMQ socket of a place, bound: who may come in, how many, and who has left.

Owns putting the socket file there, the filter by user, the limit on connections, and looking at each connection.
ZeroMQ itself removes whatever is at a path and binds, so that a second daemon would steal the first one's commands in
silence. It is given a socket that listens already: the claim binds it, behind the place's lock, under another name and
with its mode set, and renames it over the path.

Only root and the daemon's own user come in, on both sockets, whoever else is on the daemon's allow-list: ZeroMQ keeps
the parts of a message that has no end, without bound (``README.md`` has figures), and nothing that it can be told
changes that. These two could end the daemon anyway.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from weightcached.daemon.claim import Claim
from weightcached.protocol.control_sockets import Socket, endpoint, has_message, limit
from weightcached.protocol.peers import AllowList, peer_of

CONNECTIONS_MAX = 128
"""At one socket. Who comes beyond it is let go at once."""
HANDSHAKE_MAX_S = 5.0
"""For a connection that has said nothing yet."""

_EVENT_MAX_BYTES = 1024
_MODE = stat.S_IRUSR | stat.S_IWUSR
_NOBODY_ELSE = AllowList()
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

log = logging.getLogger(__name__)


class Door:
    """A socket of ``kind``, bound at ``path`` while ``claim`` is held. ``on_ready`` is called on the loop whenever
    something may have come, and has to call :meth:`look`, also after each message and before anything is noted of its
    connection; ``on_left`` is called with a connection's number, once it is gone.

    Raises what :meth:`Claim.listen_beside` raises, and zmq.ZMQError.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        kind: int,
        *,
        claim: Claim,
        path: Path,
        incoming_max: int,
        queued_max: int,
        on_ready: Callable[[], None],
        on_left: Callable[[int], None],
    ) -> None:
        self._path = path
        self._on_left = on_left
        self._on_ready = on_ready
        self.connections: set[int] = set()
        """Their descriptors, which are ZeroMQ's."""
        self._full = False
        with closing(claim.listen_beside(path, mode=_MODE)) as listener:
            self._names = (listener.getsockname(), str(path))
            self.socket = context.socket(kind)
            self._monitor = context.socket(zmq.PAIR)
            self._set_up(incoming_max=incoming_max, queued_max=queued_max)
            self.socket.set(zmq.USE_FD, listener.fileno())
            self.socket.bind(endpoint(path))
            listener.detach()  # ZeroMQ's from here on

    def _set_up(self, *, incoming_max: int, queued_max: int) -> None:
        limit(self.socket, incoming_max=incoming_max, queued_max=queued_max)
        self.socket.set(zmq.HANDSHAKE_IVL, int(HANDSHAKE_MAX_S * 1000))
        for uid in {0, os.geteuid()}:
            self.socket.set(zmq.IPC_FILTER_UID, uid)
        # Without a limit: where there is one, ZeroMQ's own thread waits in the middle of everything for a reader.
        limit(self._monitor, incoming_max=_EVENT_MAX_BYTES, queued_max=0)
        watching = f"inproc://monitor-{id(self)}"
        self.socket.monitor(watching, _WATCHED)
        self._monitor.connect(watching)

    def open(self) -> None:
        """Call ``on_ready`` from now on."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.socket.fileno(), self._on_ready)
        loop.add_reader(self._monitor.fileno(), self._on_ready)
        self._on_ready()  # what came before has announced itself already

    def look(self) -> None:
        """Take note of who has come and who has left. The connection of a message that was received is known then, or
        is gone; its number is not another's any more.
        """
        while has_message(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            number = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._came(number)
            elif number in self.connections:
                self.connections.discard(number)
                self._full = False
                self._on_left(number)

    def _came(self, number: int) -> None:
        with self._connection(number) as connection:
            if connection is None:
                return
            peer = peer_of(connection)
            if _NOBODY_ELSE.admits_uid(peer.uid) and len(self.connections) < CONNECTIONS_MAX:
                self.connections.add(number)
                return
            if not self._full:  # once, and not for each of a flood
                self._full = True
                log.warning("too many connections", extra={"socket": str(self._path), "peer": str(peer)})
            connection.shutdown(socket.SHUT_RDWR)

    def let_go(self, number: int) -> None:
        """End a connection that misbehaves, if it is still there."""
        with self._connection(number) as connection:
            if connection is not None and number in self.connections:
                connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _connection(self, number: int) -> Iterator[socket.socket | None]:
        """A duplicate of one of ZeroMQ's descriptors, while it is a connection of this socket: it may have been closed
        since it was heard of, and stand for something else by now.
        """
        try:
            duplicate = os.dup(number)
        except OSError:
            yield None
            return
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            yield None
            return
        with connection:
            ours = connection.family == socket.AF_UNIX and connection.getsockname() in self._names
            yield connection if ours else None

    def close(self) -> None:
        """Take nobody else, and end every connection. The file is the claim's to remove."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.socket.fileno())
        loop.remove_reader(self._monitor.fileno())
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)


def connection_of(part: zmq.Frame) -> int:
    """The number of the connection that a part of a message came on; -1 for what ZeroMQ itself says, when a listener
    has left.
    """
    try:
        return int(part.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
