"""What both ends of the control plane do to ZeroMQ sockets: limits, and waiting for several of them.

Owns the options that every such socket has, their end, and the two ways of waiting (blocking, and on an event loop).
ZeroMQ connects lazily, retries for ever in silence, and keeps what is unsent after a close: none of that is left on
here. A ZeroMQ socket's descriptor becomes readable when something *may* have changed, and stays so until its events are
read; that is hidden here too. Imported only by what speaks on this plane: the keeper does so after its data plane
listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Sequence
from pathlib import Path

import zmq

from weightcached.protocol.framing import HEADER
from weightcached.protocol.messages import Dialect

Socket = zmq.Socket[bytes]


def endpoint(path: Path) -> str:
    """How ZeroMQ spells ``path``."""
    return f"ipc://{path}"


def frame_max(dialect: Dialect) -> int:
    """Bytes of the largest frame of ``dialect``."""
    return HEADER.size + dialect.body_max_bytes


def limit(socket: Socket, *, incoming_max: int, queued_max: int) -> None:
    """Nothing is kept once it is closed, no part of a message may be over ``incoming_max`` bytes, and at most
    ``queued_max`` messages wait in each direction for each peer.
    """
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, incoming_max)
    socket.set(zmq.RCVHWM, queued_max)
    socket.set(zmq.SNDHWM, queued_max)


def end(context: zmq.Context[Socket]) -> None:
    """Close all sockets of ``context``, and end it. Signals wait until that is done: after one in the middle pyzmq
    takes it for done, and two threads and five descriptors are left for good.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        context.destroy(linger=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def has_message(socket: Socket) -> bool:
    """Whether something can be received at once."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def wait_readable(sockets: Sequence[Socket], timeout_s: float) -> None:
    """Until one of ``sockets`` has a message, or the time is over. Blocks."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    poller.poll(math.ceil(max(0.0, timeout_s) * 1000))


async def readable(sockets: Sequence[Socket], timeout_s: float | None = None) -> None:
    """As :func:`wait_readable`, on the running loop. ``None``: for as long as it takes."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    descriptors = [socket.fileno() for socket in sockets]
    for descriptor in descriptors:
        loop.add_reader(descriptor, woken.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    woken.clear()
                    if any(has_message(socket) for socket in sockets):  # looking is what makes it quiet again
                        return
                    await woken.wait()
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
