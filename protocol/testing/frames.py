"""Frames that lie, as bytes: what honest framing refuses to make.

Owns :func:`frame`, which builds one frame with any part of it replaced, and :func:`frame_lies`, a collection that every
reader has to refuse at once. Pure; for tests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgpack

from weightcached.protocol.control import CONTROL_ANSWERS, CONTROL_EVENTS, CONTROL_REQUESTS
from weightcached.protocol.framing import HEADER, MAGIC
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, PROTOCOL_VERSION, Dialect, Message
from weightcached.protocol.worker_messages import KEEPER_TO_WORKER, WORKER_TO_KEEPER

UINT32_MAX = 0xFFFF_FFFF
_CONTROL = (CONTROL_REQUESTS, CONTROL_ANSWERS, CONTROL_EVENTS)
_DATA = (CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, KEEPER_TO_WORKER, WORKER_TO_KEEPER)
_TYPE_NUMBERS = {kind: number for dialect in (*_CONTROL, *_DATA) for number, kind in dialect.types.items()}


def frame(
    message: Message,
    *,
    fields: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    body: bytes | None = None,
    magic: bytes = MAGIC,
    version: int = PROTOCOL_VERSION,
    type_number: int | None = None,
    body_nbytes: int | None = None,
    fd_count: int = 0,
    dialect: Dialect | None = None,
) -> bytes:
    """The bytes of ``message`` as a frame, honest but for what is named. ``dialect``: for what is said on the control
    plane as well as on the data plane, which is meant where it is left out.

    ``fields`` replaces or adds fields of the body, ``without`` leaves some out, ``body`` replaces it whole. The others
    are the header's; ``body_nbytes`` and ``fd_count`` announce what need not come.
    """
    if body is None:
        values = {**message.model_dump(), **(fields or {})}
        body = msgpack.packb({name: value for name, value in values.items() if name not in without})
    numbers = _TYPE_NUMBERS if dialect is None else {kind: number for number, kind in dialect.types.items()}
    number = numbers[type(message)] if type_number is None else type_number
    nbytes = len(body) if body_nbytes is None else body_nbytes
    return HEADER.pack(magic, version, number, nbytes, fd_count) + body


def nested_lists(depth: int) -> bytes:
    """msgpack of ``[[[…]]]``, without needing the stack that packing it would."""
    return b"\x91" * (depth - 1) + b"\x90"


def pickle_that_creates(path: str) -> bytes:
    """A pickle that creates the file ``path`` if it is ever loaded: code on the wire, with an effect a test can see."""
    return f"cbuiltins\nopen\n(V{path}\nVw\ntR.".encode()


def frame_lies(message: Message, *, pickle_target: str) -> dict[str, bytes]:
    """What is wrong → a frame like ``message``'s that any reader must refuse without waiting for more.

    ``message`` has at least one field. ``pickle_target`` is the file that a reader creates if it unpickles.
    """
    field = next(iter(type(message).model_fields))
    return {
        "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "another magic": frame(message, magic=b"WCD2"),
        "version 0": frame(message, version=0),
        "the next version": frame(message, version=PROTOCOL_VERSION + 1),
        "type 0": frame(message, type_number=0),
        "an unknown type": frame(message, type_number=0xFFFF),
        "a body over every limit": frame(message, body_nbytes=64 * 1024 * 1024 + 1),
        "a body of 4 GiB": frame(message, body_nbytes=UINT32_MAX),
        "no body": frame(message, body=b""),
        "not msgpack": frame(message, body=b"\xc1" * 8),
        "a map cut short": frame(message, body=msgpack.packb(message.model_dump())[:-1]),
        "two bodies": frame(message, body=msgpack.packb(message.model_dump()) * 2),
        "a list": frame(message, body=b"\x90"),
        "nothing": frame(message, body=b"\xc0"),
        "a number": frame(message, body=b"\x01"),
        "a list of 2^32-1 items": frame(message, body=b"\xdd\xff\xff\xff\xff" + b"\xc0" * 64),
        "a map of 2^32-1 items": frame(message, body=b"\xdf\xff\xff\xff\xff" + b"\xc0" * 64),
        "text of 2^32-1 bytes": frame(message, body=b"\xdb\xff\xff\xff\xff" + b"a" * 64),
        "nested 1,000 deep": frame(message, body=nested_lists(1_000)),
        "nested 60,000 deep": frame(message, body=nested_lists(60_000)),
        "nested in a field": frame(message, body=b"\x81" + msgpack.packb(field) + nested_lists(900)),
        "many small lists": frame(message, body=b"\x81" + msgpack.packb(field) + b"\xdc\xea\x60" + b"\x90" * 60_000),
        "an extension type": frame(message, fields={field: msgpack.ExtType(42, b"code")}),
        "a timestamp": frame(message, fields={field: msgpack.Timestamp(0, 0)}),
        "text that is not UTF-8": frame(message, body=b"\x81" + msgpack.packb(field) + b"\xa2\xff\xfe"),
        "a key that is a number": frame(message, body=b"\x81\x01\x02"),
        "a key that is bytes": frame(message, body=msgpack.packb({field.encode(): 1})),
        "an unknown field": frame(message, fields={"surprise": 1}),
        "a missing field": frame(message, without=[field]),
        "a field of another type": frame(message, fields={field: {}}),
        "a field of bytes": frame(message, fields={field: b"1"}),
        "a field that is null": frame(message, fields={field: None}),
        "a field that is negative": frame(message, fields={field: -1}),
        "a field that is NaN": frame(message, fields={field: float("nan")}),
        "a pickle": frame(message, body=pickle_that_creates(pickle_target)),
        "a pickle in a field": frame(message, fields={field: pickle_that_creates(pickle_target)}),
        "a descriptor that does not come": frame(message, fd_count=1),
        "2^32-1 descriptors": frame(message, fd_count=UINT32_MAX),
    }
