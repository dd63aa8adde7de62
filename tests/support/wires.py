"""Honest messages and connected pairs, for tests of framing and its edges."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from weightcached.protocol.channel import Channel
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Dialect, Hello

HELLO = Hello(
    client_version="0.1.0",
    name="engine",
    pid=1,
    config={"architecture": "LlamaForCausalLM", "model.rope_theta": 1e4, "model.sliding_window": None},
    fingerprint="0" * 64,
    receipts="1" * 64,
    receipts_trusted=True,
    digest=None,
    want="checkpoint",
    wait_s=1.5,
)

REQUESTS_WITH_FDS: Dialect = replace(CLIENT_TO_DAEMON, fds_max=3)
"""The client's messages, where three descriptors are allowed: to see each go wrong in turn."""


@contextmanager
def socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far:
        yield near, far


@contextmanager
def channel_pair() -> Iterator[tuple[Channel, Channel]]:
    """A client's channel and the daemon's."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    client = Channel(near, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
    daemon = Channel(far, outgoing=DAEMON_TO_CLIENT, incoming=CLIENT_TO_DAEMON)
    try:
        yield client, daemon
    finally:
        client.close()
        daemon.close()
