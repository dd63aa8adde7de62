"""Asking a daemon how it is, from another process: one connection, one question, one answer, under a deadline.

Owns what the commands ``status``, ``wait`` and ``release`` share: connecting (with the client's checks of directory,
owner and peer) and telling apart why nobody answers. Blocking.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from contextlib import suppress
from typing import TypeVar

from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonNotReady,
    DaemonUnreachable,
    InvalidPlace,
    ProtocolError,
    error_from,
)
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Message, Refused, Report, Status
from weightcached.protocol.peers import AllowList, check_daemon, check_directory, check_socket_owner, peer_of
from weightcached.protocol.places import Place

_BACKLOG_PAUSE_S = 0.01


def connect(place: Place, *, allowed: AllowList, deadline: Deadline) -> Channel:
    """A connection to the daemon of ``place``; the caller closes it.

    Raises DaemonAbsent (no socket file), DaemonUnreachable (nobody behind it), DaemonNotReady (its backlog stays full),
    UntrustedDaemon or InvalidPlace.
    """
    path = place.socket_path
    try:
        for directory in (place.runtime_dir, place.directory):
            check_directory(directory, allowed)
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DaemonAbsent("no daemon serves this place", where=path) from error
    except OSError as error:
        raise InvalidPlace("the place cannot be looked at", found=error.strerror, where=path) from error
    if not stat.S_ISSOCK(found.st_mode):
        raise InvalidPlace("not a socket", expected="a socket", found=stat.filemode(found.st_mode), where=path)
    check_socket_owner(path, found, allowed)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        _connect(connection, place, deadline)
        check_daemon(peer_of(connection), path, allowed)
    except BaseException:
        connection.close()
        raise
    return Channel(connection, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)


def _connect(connection: socket.socket, place: Place, deadline: Deadline) -> None:
    path = str(place.socket_path)
    while True:
        number = connection.connect_ex(path)
        if number == 0:
            return
        if number == errno.EAGAIN and not deadline.passed:
            time.sleep(_BACKLOG_PAUSE_S)  # no event tells when a Unix socket's backlog has room
        elif number == errno.EAGAIN:
            raise DaemonNotReady("the daemon does not take connections: its backlog stays full", where=path)
        elif number == errno.ECONNREFUSED:
            raise DaemonUnreachable("nobody listens there: the daemon died", where=path)
        elif number == errno.ENOENT:
            raise DaemonAbsent("no daemon serves this place", where=path)
        else:
            raise InvalidPlace("cannot connect", found=os.strerror(number), where=path)


_Answer = TypeVar("_Answer", bound=Message)


def ask_status(channel: Channel, deadline: Deadline) -> Report:
    """One question on an open connection. Raises the daemon's refusal, DaemonNotReady (no answer in time), or
    DaemonUnreachable (it went away)."""
    return ask(channel, Status(), Report, deadline)


def ask(channel: Channel, question: Message, kind: type[_Answer], deadline: Deadline) -> _Answer:
    """As :func:`ask_status`, for any question and the kind of its answer."""
    try:
        with suppress(PeerClosed):  # it may have refused us unasked: what it said is still to be read
            channel.send(question, deadline=deadline)
        with (frame := channel.receive(deadline=deadline)).fds:
            message = frame.message
    except TimeoutError as error:
        raise DaemonNotReady(
            "the daemon took the connection but does not answer", next_step="is it stopped, or very busy?"
        ) from error
    except OSError as error:
        raise DaemonUnreachable("the daemon went away while it was asked", found=str(error)) from error
    if isinstance(message, kind):
        return message
    if isinstance(message, Refused):
        raise error_from(message.model_dump())
    raise ProtocolError(
        f"not an answer to {type(question).__name__}", expected=kind.__name__, found=type(message).__name__
    )
