"""From a place to a connection that may be trusted, or the finding that there is none. Not one byte is sent here.

Owns connecting, waiting for a socket to appear or for room in a backlog, and checking who is at the other end.
What to do about what is found is ``policy.py``'s. Called by ``attach.py``.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from weightcached.client.forks import new_connection
from weightcached.client.policy import Entry, Finding, judge, refused
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import DaemonNotReady, DaemonUnreachable
from weightcached.protocol.peers import AllowList, check_daemon, check_directory, check_socket_owner, peer_of
from weightcached.protocol.places import Place

# Neither a path that appears nor a backlog that empties can be waited on without holding something of the daemon's, so
# both are looked at again: soon at first, then at most twenty times a second.
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05


def reach(
    place: Place,
    *,
    allowed: AllowList,
    deadline: Deadline,
    appear_by: Deadline,
    lost: DaemonUnreachable | None = None,
) -> socket.socket | None:
    """A connection to the place's daemon, or None where the place is absent. The caller owns the connection.

    Waits until ``appear_by`` for an absent socket to appear, until ``deadline`` while the backlog is full; with a
    deadline that has passed it looks once. ``lost`` is for an attach that had been connected to a daemon that died:
    it waits until ``deadline`` for the next one, then raises ``lost``. Raises InvalidPlace, UntrustedDaemon,
    DaemonUnreachable, DaemonNotReady.
    """
    pause_s = _FIRST_PAUSE_S
    if lost is not None and deadline.passed:
        raise lost
    while True:
        connection, finding = _try(place.socket_path)
        if connection is not None:
            try:
                _check_trust(place, connection, allowed)
            except BaseException:
                connection.close()
                raise
            return connection
        if finding is Finding.REFUSED and lost is None:
            raise refused(place.socket_path)
        if finding is Finding.ABSENT and min(appear_by.at_s, deadline.at_s) <= time.monotonic():
            return None
        if deadline.passed:
            raise lost or _not_ready(place.socket_path, finding)
        if finding is not Finding.CHANGED:
            time.sleep(min(pause_s, deadline.remaining_s()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _try(path: Path) -> tuple[socket.socket | None, Finding]:
    connection = new_connection()
    try:
        # A Unix socket connects at once or not at all: EAGAIN means a full backlog, never "in progress".
        error = connection.connect_ex(os.fspath(path))
        finding = judge(error, Entry.at(path), path)
    except BaseException:
        connection.close()
        raise
    if finding is Finding.CONNECTED:
        return connection, finding
    connection.close()
    return None, finding


def _check_trust(place: Place, connection: socket.socket, allowed: AllowList) -> None:
    """Directories first (who could have put the socket there), then the socket's owner, then the process behind it."""
    try:
        for directory in (place.runtime_dir, place.directory):
            check_directory(directory, allowed)
        check_socket_owner(place.socket_path, os.lstat(place.socket_path), allowed)
    except FileNotFoundError:
        pass  # removed since we connected, by a daemon that stops: whom we are connected to is still checked
    check_daemon(peer_of(connection), place.socket_path, allowed)


def _not_ready(path: Path, finding: Finding) -> DaemonNotReady:
    what = "the daemon's backlog stayed full" if finding is Finding.BUSY else "the daemon's socket did not hold still"
    return DaemonNotReady(
        f"{what} until the deadline",
        where=path,
        next_step="allow more time, or find out what keeps the daemon from accepting connections",
    )
