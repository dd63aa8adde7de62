"""Asking one daemon one thing on the control plane, with an answer or an error before a deadline.

Owns a question's way: looking at the socket file as the data plane's client does (directory, owner, who listens),
one DEALER socket for each attempt, the answer's checks, and telling apart why there is none. :func:`ask` (on an event
loop) and :func:`ask_blocking` are the same steps with another way of waiting. Used by the coordinator, by keepers
that read their leader's decision, and by commands.

A question is two parts: a random number, which the answer repeats, and one frame (``framing.py``). Where the daemon
goes away before it has answered, the question is asked again of the one that comes back: every command of this plane
may be sent again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import stat
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from weightcached.protocol.control import CONTROL_ANSWERS, CONTROL_REQUESTS
from weightcached.protocol.control_sockets import (
    Socket,
    end,
    endpoint,
    frame_max,
    has_message,
    limit,
    readable,
    wait_readable,
)
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonNotReady,
    DaemonUnreachable,
    InvalidPlace,
    ProtocolError,
    UntrustedClient,
    WeightCacheError,
    error_from,
)
from weightcached.protocol.framing import decode_frame, encode_frame
from weightcached.protocol.messages import Message, Refused
from weightcached.protocol.peers import AllowList, Peer, check_daemon, check_directory, check_socket_owner, peer_of
from weightcached.protocol.places import Place

PATIENCE_S = 10.0
"""For how long nobody may be there: a keeper that is started again comes back well within."""
REQUEST_ID_BYTES = 8

_PAUSE_S = 0.05
_NOBODY = AllowList()
_Answer = TypeVar("_Answer", bound=Message)
_NOT_CONNECTED = zmq.EVENT_CLOSED
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | _ENDED | _NOT_CONNECTED


@dataclass(frozen=True, slots=True)
class _Wait:
    """What a question waits for: a message at one of ``sockets``, for no longer than this."""

    sockets: tuple[Socket, ...]
    timeout_s: float


_Steps = Generator[_Wait, None, _Answer]


async def ask(
    place: Place,
    request: Message,
    answer: type[_Answer],
    *,
    deadline: Deadline,
    patience_s: float = PATIENCE_S,
    allowed: AllowList = _NOBODY,
) -> _Answer:
    """What the daemon of ``place`` answers to ``request``. ``allowed``: whom to trust as a daemon, beside root and us.

    ``deadline`` is for all of it; nobody may be there for ``patience_s`` in a row. Raises the daemon's refusal as its
    error; DaemonAbsent where no weights are cached; DaemonUnreachable (nobody listens) and DaemonNotReady (no answer in
    time); UntrustedDaemon, UntrustedClient, InvalidPlace; ProtocolError for what is no answer.
    """
    steps = _asking(place, request, answer, deadline, patience_s, allowed)
    try:
        while True:
            wait = next(steps)
            if wait.sockets:
                await readable(wait.sockets, wait.timeout_s)
            else:
                await asyncio.sleep(wait.timeout_s)
    except StopIteration as end:
        return _result(end, answer)
    finally:
        steps.close()


def ask_blocking(
    place: Place,
    request: Message,
    answer: type[_Answer],
    *,
    deadline: Deadline,
    patience_s: float = PATIENCE_S,
    allowed: AllowList = _NOBODY,
) -> _Answer:
    """As :func:`ask`, for callers without an event loop."""
    steps = _asking(place, request, answer, deadline, patience_s, allowed)
    try:
        while True:
            wait = next(steps)
            if wait.sockets:
                wait_readable(wait.sockets, wait.timeout_s)
            else:
                time.sleep(wait.timeout_s)
    except StopIteration as end:
        return _result(end, answer)
    finally:
        steps.close()


def _result(end: StopIteration, answer: type[_Answer]) -> _Answer:
    found: _Answer = end.value
    return found


def _asking(
    place: Place, request: Message, answer: type[_Answer], deadline: Deadline, patience_s: float, allowed: AllowList
) -> _Steps[_Answer]:
    frame = encode_frame(CONTROL_REQUESTS, request)
    context = zmq.Context()
    try:
        patience = Deadline.after(patience_s)
        while True:
            peer, missing = look(place, place.control_path, allowed)
            if peer is not None and deadline.passed:
                raise missing or _no_time(place)
            if peer is not None:
                attempt = _Attempt(context, place, secrets.token_bytes(REQUEST_ID_BYTES), frame)
                try:
                    message = yield from attempt.steps(deadline)
                finally:
                    attempt.close()
                if message is not None:
                    return _checked(message, request, answer)
                missing = attempt.failure
                if attempt.turned_away and not _is_admitted(peer):
                    raise missing
                if attempt.greeted:
                    patience = Deadline.after(patience_s)
            until = min(deadline.at_s, patience.at_s)
            if until <= time.monotonic() and missing is not None:
                raise missing
            yield _Wait((), min(_PAUSE_S, max(0.0, until - time.monotonic())))
    finally:
        end(context)


def _no_time(place: Place) -> DaemonNotReady:
    """The daemon cannot be blamed: nobody has asked it."""
    return DaemonNotReady(
        "there was no time left to ask the daemon",
        expected="time for an answer",
        found="0 s",
        where=place.control_path,
        next_step="allow more time",
    )


def _is_admitted(daemon: Peer) -> bool:
    """Whether a daemon takes commands from us: only from root and from its own user."""
    return os.geteuid() in (0, daemon.uid)


def _checked(message: Message, request: Message, answer: type[_Answer]) -> _Answer:
    if isinstance(message, Refused):
        raise error_from(message.model_dump())
    if not isinstance(message, answer):
        raise ProtocolError(
            f"not an answer to {type(request).__name__}", expected=answer.__name__, found=type(message).__name__
        )
    return message


class _Attempt:
    """One connection, one question."""

    def __init__(self, context: zmq.Context[Socket], place: Place, request_id: bytes, frame: bytes) -> None:
        self._request_id = request_id
        self._where = place.control_path
        self._dealer = context.socket(zmq.DEALER)
        limit(self._dealer, incoming_max=frame_max(CONTROL_ANSWERS), queued_max=4)
        self._dealer.set(zmq.RECONNECT_IVL, -1)
        self._monitor = self._dealer.get_monitor_socket(_WATCHED)
        self.greeted = False
        self.turned_away = False
        """Left before a word was said."""
        self.failure: WeightCacheError = DaemonNotReady(
            "the daemon took the command but does not answer in time",
            where=self._where,
            next_step="allow more time; is it stopped, or very busy?",
        )
        self._dealer.connect(endpoint(self._where))
        with suppress(zmq.Again):  # the connection has ended already: how, is said by what watches it
            self._dealer.send_multipart([request_id, frame], zmq.NOBLOCK)

    def steps(self, deadline: Deadline) -> Generator[_Wait, None, Message | None]:
        """The answer; ``None`` with :attr:`failure` where the daemon went away, or the time is over."""
        while True:
            if has_message(self._dealer):
                return self._received()
            if has_message(self._monitor):
                if self._is_gone() and not has_message(self._dealer):  # its last word may have come meanwhile
                    return None
                continue
            if deadline.passed:
                return None
            yield _Wait((self._dealer, self._monitor), deadline.remaining_s())

    def _is_gone(self) -> bool:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.greeted = True
            return False
        if self.greeted:
            self.failure = DaemonUnreachable("the daemon went away before it answered", where=self._where)
        elif event == _NOT_CONNECTED:
            self.failure = DaemonUnreachable("the daemon went away before it could be asked", where=self._where)
        else:
            self.turned_away = True
            self.failure = UntrustedClient(
                "the daemon ends connections of this user",
                expected="root, or the user that the daemon runs as",
                found=f"uid {os.geteuid()}",
                where=self._where,
                next_step="run this as the daemon's user",
            )
        return True

    def _received(self) -> Message:
        parts = self._dealer.recv_multipart(zmq.NOBLOCK)
        if len(parts) != 2 or parts[0] != self._request_id:
            raise ProtocolError(
                "not an answer to what was asked",
                expected="the question's number, and one frame",
                found=f"{len(parts)} parts of {[len(part) for part in parts[:8]]} bytes",
                where=self._where,
            )
        return decode_frame(CONTROL_ANSWERS, parts[1])

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0)


def look(place: Place, path: os.PathLike[str], allowed: AllowList) -> tuple[Peer | None, WeightCacheError | None]:
    """Who listens at ``path``, a socket of ``place``'s; or ``None``, and the error for it, where nobody does (yet).

    ZeroMQ would not tell. Raises where waiting is of no use: DaemonAbsent, UntrustedDaemon, UntrustedClient or
    InvalidPlace.
    """
    try:
        for directory in (place.runtime_dir, place.directory):
            check_directory(directory, allowed)
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None, _without_socket(place, path)
    except OSError as error:
        raise InvalidPlace("the place cannot be looked at", found=error.strerror, where=path) from error
    if not stat.S_ISSOCK(found.st_mode):
        raise InvalidPlace("not a socket", expected="a socket", found=stat.filemode(found.st_mode), where=path)
    check_socket_owner(place.control_path.with_name(os.path.basename(path)), found, allowed)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        number = probe.connect_ex(os.fspath(path))
        if number == 0:
            peer = peer_of(probe)
            check_daemon(peer, place.control_path, allowed)
            return peer, None
    if number == errno.EAGAIN:
        return None, DaemonNotReady("the daemon does not take connections: its backlog stays full", where=path)
    if number in (errno.ECONNREFUSED, errno.ENOENT):
        return None, DaemonUnreachable("nobody listens there: the daemon died", where=path)
    if number == errno.EACCES:
        raise UntrustedClient(
            "this user may not command the daemon", where=path, next_step="run this as root, or as the daemon's user"
        )
    raise InvalidPlace("cannot connect", found=os.strerror(number), where=path)


def _without_socket(place: Place, path: os.PathLike[str]) -> WeightCacheError:
    """Raises DaemonAbsent where there is no daemon either; what else it means that it has no such socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        number = probe.connect_ex(os.fspath(place.socket_path))
    if number in (errno.ENOENT, errno.ENOTDIR):
        with suppress(OSError):
            os.lstat(place.socket_path)
            return DaemonNotReady("the daemon's socket did not hold still", where=place.socket_path)
        raise DaemonAbsent(
            "no daemon serves this place", where=place.socket_path, next_step="start `weightcached serve` for it"
        )
    if number == errno.ECONNREFUSED:
        return DaemonUnreachable("nobody listens there: the daemon died", where=place.socket_path)
    return DaemonNotReady(
        "the daemon takes no commands yet",
        where=path,
        next_step="wait until it has started; its log says when its control plane is there",
    )
