"""Frames: how a message and its descriptors become bytes on a Unix stream socket, and back.

Owns the header, the limits, and two non-blocking step machines (:class:`FrameReceiver`, :class:`FrameSender`) that the
blocking edge (``channel.py``) and the asyncio edge (``aio.py``) both drive. Waiting, deadlines and connections are
theirs.

A frame is ``magic "WCD1" · protocol version u16 · type u16 · body length u32 · fd count u32`` (little endian, 16
bytes), then a msgpack map. Descriptors ride on the frame's first byte. Reads ask for exactly the bytes that are
missing: a larger read could merge two frames and lose which descriptors belong to which.
"""

from __future__ import annotations

import array
import socket
import struct
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgpack
from pydantic import ValidationError

from weightcached.protocol.errors import ProtocolError, TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.messages import PROTOCOL_VERSION, Dialect, Message

MAGIC = b"WCD1"
HEADER = struct.Struct("<4sHHII")

_FD_BYTES = array.array("i").itemsize
_Container = TypeVar("_Container", bound=Sized)


class PeerClosed(ConnectionError):
    """The peer closed the connection, or was killed. ``mid_frame`` tells whether a frame was half through."""

    def __init__(self, *, mid_frame: bool) -> None:
        super().__init__("the peer closed the connection" + (" in the middle of a frame" if mid_frame else ""))
        self.mid_frame = mid_frame


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's header, checked against a dialect's limits."""

    type_number: int
    body_nbytes: int
    fd_count: int


@dataclass(slots=True)
class Frame:
    """One received message with its descriptors. Whoever gets it closes ``fds`` or takes them."""

    message: Message
    fds: OwnedFds


def encode_frame(dialect: Dialect, message: Message, *, fd_count: int = 0) -> bytes:
    """Header and body of ``message``. ProtocolError when it is over the dialect's limits (nothing was sent)."""
    try:
        body = msgpack.packb(message.model_dump())
    except (ValueError, OverflowError) as error:  # text that is not Unicode, integers over 64 bits, nested too deeply
        raise ProtocolError(
            f"{type(message).__name__} holds a value that cannot be sent", found=_brief(error), where=dialect.name
        ) from error
    if len(body) > dialect.body_max_bytes:
        raise ProtocolError(
            f"{type(message).__name__} is too large to send",
            expected=f"at most {dialect.body_max_bytes} bytes",
            found=f"{len(body)} bytes",
            where=dialect.name,
        )
    if fd_count > dialect.fds_max:
        raise ProtocolError(
            "too many descriptors for one frame",
            expected=f"at most {dialect.fds_max}",
            found=fd_count,
            where=dialect.name,
        )
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, dialect.number_of(message), len(body), fd_count) + body


def decode_header(dialect: Dialect, data: bytes | bytearray | memoryview) -> Header:
    """Check all of a header before anything is allocated for the body. Raises ProtocolError."""
    magic, version, number, body_nbytes, fd_count = HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("not a weightcached frame", expected=MAGIC, found=magic, where=dialect.name)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            "the peer speaks another protocol version",
            expected=PROTOCOL_VERSION,
            found=version,
            where=dialect.name,
            next_step="install the same weightcached release on both sides",
        )
    if number not in dialect.types:
        raise ProtocolError("unknown message type", expected=sorted(dialect.types), found=number, where=dialect.name)
    if body_nbytes > dialect.body_max_bytes:
        raise ProtocolError(
            "the announced body is over the limit",
            expected=f"at most {dialect.body_max_bytes} bytes",
            found=f"{body_nbytes} bytes",
            where=dialect.name,
        )
    if fd_count > dialect.fds_max:
        raise ProtocolError(
            "too many descriptors announced", expected=f"at most {dialect.fds_max}", found=fd_count, where=dialect.name
        )
    return Header(number, body_nbytes, fd_count)


def decode_body(dialect: Dialect, header: Header, body: bytes | bytearray | memoryview) -> Message:
    """The message of a complete body. Raises ProtocolError for anything but one valid map of that type."""
    kind = dialect.types[header.type_number]
    budget = _ItemBudget(dialect.items_max)
    try:
        value: Any = msgpack.unpackb(
            body,
            strict_map_key=True,
            max_array_len=min(dialect.list_max, len(body)),
            max_map_len=dialect.items_max,
            max_ext_len=0,
            unicode_errors="strict",
            list_hook=budget.spend,
            object_hook=budget.spend,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(
            f"the body of a {kind.__name__} is not msgpack within limits", found=_brief(error), where=dialect.name
        ) from error
    if not isinstance(value, dict):
        raise ProtocolError(
            f"the body of a {kind.__name__} is not a map", found=type(value).__name__, where=dialect.name
        )
    try:
        return kind.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise ProtocolError(f"not a valid {kind.__name__}", found=_brief(error), where=dialect.name) from error


def decode_frame(dialect: Dialect, data: bytes | bytearray | memoryview) -> Message:
    """The message of one whole frame that carries no descriptors, as the control plane's ZeroMQ messages are. Raises
    ProtocolError.
    """
    if len(data) < HEADER.size:
        raise ProtocolError(
            "too short for a frame", expected=f"at least {HEADER.size} bytes", found=len(data), where=dialect.name
        )
    view = memoryview(data)
    header, body = decode_header(dialect, view[: HEADER.size]), view[HEADER.size :]
    if len(body) != header.body_nbytes:
        raise ProtocolError(
            "the body's length is not the one announced",
            expected=header.body_nbytes,
            found=len(body),
            where=dialect.name,
        )
    return decode_body(dialect, header, body)


class _ItemBudget:
    """Counts what the containers of one body hold, so that many small ones cost no more than one large one."""

    def __init__(self, items_max: int) -> None:
        self._items_max = items_max
        self._left = items_max

    def spend(self, container: _Container) -> _Container:
        """Called by msgpack with every list and map. An empty one counts too."""
        self._left -= len(container) + 1
        if self._left < 0:
            raise ValueError(f"more than {self._items_max} items in all")
        return container


def _brief(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'message'}: {first['msg']}"[:500]
    return f"{type(error).__name__}: {error}"[:500]


class Budget(Protocol):
    """Room for bodies that are not whole yet."""

    def take(self, nbytes: int) -> None:
        """Called before a body is allocated. May raise; the stream is then of no more use."""

    def give(self, nbytes: int) -> None:
        """Called when the body has become a message, or never will."""


class FrameReceiver:
    """Assembles frames from a non-blocking socket by exact reads. Owns received descriptors until a frame is whole."""

    def __init__(self, dialect: Dialect, *, budget: Budget | None = None) -> None:
        self._dialect = dialect
        self._budget = budget
        self._taken_nbytes = 0
        # CMSG_SPACE would admit one descriptor more than asked for on 64-bit machines.
        self._control_nbytes = socket.CMSG_LEN(dialect.fds_max * _FD_BYTES) if dialect.fds_max else 0
        self._fds = OwnedFds()
        self._start()

    def _start(self) -> None:
        self._header: Header | None = None
        self._buffer = bytearray(HEADER.size)
        self._filled = 0

    @property
    def mid_frame(self) -> bool:
        """Whether part of a frame has arrived."""
        return self._header is not None or self._filled > 0

    def step(self, connection: socket.socket) -> Frame | None:
        """Read once. Returns a frame when it is whole, None when more has to come.

        Raises BlockingIOError when nothing is there, PeerClosed at end of file (or reset), ProtocolError or
        TransferError for bad input. After any error but BlockingIOError every received descriptor is closed, and the
        stream is of no more use.
        """
        try:
            self._read_once(connection)
            if self._filled < len(self._buffer):
                return None
            if self._header is None:
                self._header = self._checked_header()
                if self._header.body_nbytes:
                    self._take(self._header.body_nbytes)
                    self._buffer, self._filled = bytearray(self._header.body_nbytes), 0
                    return None
                self._buffer = bytearray()
            return self._finish(self._header)
        except BlockingIOError:
            raise
        except BaseException:
            self.close()
            raise

    def _read_once(self, connection: socket.socket) -> None:
        # Where a peer wrote a header in two pieces the kernel may deliver both, and descriptors of the second, here.
        first_byte = self._header is None and self._filled == 0
        control_nbytes = self._control_nbytes if first_byte else 0
        missing = memoryview(self._buffer)[self._filled :]
        try:
            nbytes, control, flags, _ = connection.recvmsg_into([missing], control_nbytes, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError as error:  # the peer went without having read all that was sent to it
            raise PeerClosed(mid_frame=self.mid_frame) from error
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise TransferError(
                "descriptors arrived that there was no room for",
                expected=f"at most {self._dialect.fds_max}, on a frame's first byte",
                where=self._dialect.name,
                next_step="if the peer is known to be good, raise this process's limit of open files (ulimit -n)",
            )
        if nbytes == 0:
            raise PeerClosed(mid_frame=self.mid_frame)
        self._filled += nbytes

    def _checked_header(self) -> Header:
        header = decode_header(self._dialect, self._buffer)
        if len(self._fds) != header.fd_count:
            raise TransferError(
                "the number of descriptors is not the one announced",
                expected=header.fd_count,
                found=len(self._fds),
                where=self._dialect.name,
            )
        return header

    def _finish(self, header: Header) -> Frame:
        message = decode_body(self._dialect, header, self._buffer)
        fds, self._fds = self._fds, OwnedFds()
        self._start()
        self._give()
        return Frame(message, fds)

    def _take(self, nbytes: int) -> None:
        if self._budget is not None:
            self._budget.take(nbytes)
            self._taken_nbytes = nbytes

    def _give(self) -> None:
        nbytes, self._taken_nbytes = self._taken_nbytes, 0
        if self._budget is not None and nbytes:
            self._budget.give(nbytes)

    def close(self) -> None:
        """Close the descriptors of a frame that will not be completed. Safe to call twice."""
        self._give()
        self._fds.close()


class FrameSender:
    """Sends one encoded frame in as many steps as the socket needs. Does not own the descriptors it sends."""

    def __init__(self, data: bytes, fds: list[int] | tuple[int, ...] = ()) -> None:
        self._left = memoryview(data)
        self._fds = array.array("i", fds)
        self._begun = False

    def step(self, connection: socket.socket) -> bool:
        """Send once; true when the frame is out. Raises BlockingIOError when the socket is full, PeerClosed when it is
        gone.

        What the peer said before it went can still be received.
        """
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, self._fds)] if self._fds else []
        try:
            sent = connection.sendmsg([self._left], control, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerClosed(mid_frame=self._begun) from error
        self._fds = array.array("i")
        self._left = self._left[sent:]
        self._begun = True
        return not self._left
