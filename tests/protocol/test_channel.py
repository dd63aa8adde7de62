"""The blocking edge: one deadline over a whole exchange, whatever the peer does with its time."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Self

import pytest

from tests.support.resources import nothing_left_behind
from tests.support.wires import HELLO, channel_pair
from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import ProtocolError, TransferError
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Loading, Message, Ping, Pong, Refused
from weightcached.protocol.testing import (
    Close,
    Drip,
    Gate,
    LyingDaemon,
    Receive,
    Repeat,
    Reset,
    Send,
    SendRaw,
    Stall,
    Step,
    frame,
)

PING, PONG = Ping(token=7), Pong(token=7)
LOADING = Loading(stage="reading", bytes_done=0, bytes_total=1, bytes_per_s=0)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture
def connect(tmp_path):
    """Connects to a daemon that follows a script."""
    opened = []

    def connect(*script: Step) -> Channel:
        daemon = LyingDaemon(tmp_path / "lying.sock", script)
        daemon.__enter__()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(daemon.path))
        channel = Channel(connection, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
        opened.extend([channel.close, lambda: daemon.__exit__(None, None, None)])
        return channel

    yield connect
    while opened:
        opened.pop(0)()


def exchange(channel: Channel, *, timeout_s: float = 5) -> Message:
    """Ask, and wait for the answer, under one deadline."""
    deadline = Deadline.after(timeout_s)
    channel.send(PING, deadline=deadline)
    while isinstance(message := channel.receive(deadline=deadline).message, Loading):
        pass
    return message


def send_for_ever(channel: Channel, message: Message, *, timeout_s: float) -> None:
    while True:
        channel.send(message, deadline=Deadline.after(timeout_s))


class Timed:
    """Seconds that a block took."""

    def __enter__(self) -> Self:
        self.start = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.s = time.monotonic() - self.start


def test_messages_go_both_ways() -> None:
    with channel_pair() as (client, daemon):
        client.send(HELLO)
        assert daemon.receive().message == HELLO
        daemon.send(PONG)
        assert client.receive().message == PONG


@pytest.mark.parametrize(
    "script",
    [
        [Stall()],
        [Receive(), Stall()],
        [Receive(), Drip(frame(LOADING) * 1000, every_s=0.02)],
        [Receive(), SendRaw(frame(PONG)[:-1]), Stall()],
        [Receive(), Repeat(Send(LOADING), every_s=0.01)],
        [Receive(), Repeat(Send(LOADING), every_s=0)],
    ],
    ids=["silent", "silent after reading", "dripping", "all but one byte", "loading for ever", "flooding"],
)
def test_the_deadline_bounds_the_whole_exchange(connect, script: list[Step]) -> None:
    """A limit for each read would let a peer that drips hold on for ever."""
    channel = connect(*script)
    with Timed() as took, pytest.raises(TimeoutError):
        exchange(channel, timeout_s=0.2)
    assert 0.2 <= took.s < 2


def test_a_deadline_that_has_passed_is_a_timeout_and_loses_nothing() -> None:
    with channel_pair() as (client, daemon):
        daemon.send(PONG)
        with pytest.raises(TimeoutError):
            client.receive(deadline=Deadline.after(0))
        assert client.receive(deadline=Deadline.after(5)).message == PONG


def test_sending_to_a_peer_that_does_not_read_ends_at_the_deadline() -> None:
    message = Refused(code="x", message="m" * 32_000)
    with channel_pair() as (_, daemon):
        with Timed() as took, pytest.raises(TimeoutError):
            send_for_ever(daemon, message, timeout_s=0.1)
        assert took.s < 5


def test_sending_in_pieces_to_a_slow_reader_ends_at_the_deadline() -> None:
    """Each piece finds room in time; the frame does not."""
    message = Refused(code="x", message="m" * 32_000, found="f" * 32_000, where="w" * 32_000)
    with channel_pair() as (client, daemon):
        daemon.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stop = threading.Event()

        def read_slowly() -> None:
            client.connection.setblocking(True)
            while client.connection.recv(1024) and not stop.wait(0.02):
                pass

        reader = threading.Thread(target=read_slowly)
        reader.start()
        with Timed() as took, pytest.raises(TimeoutError):
            daemon.send(message, deadline=Deadline.after(0.2))
        assert took.s < 2
        stop.set()
        daemon.close()
        reader.join()


def test_what_has_arrived_before_a_timeout_is_kept(connect) -> None:
    gate = Gate()
    data = frame(PONG)
    channel = connect(SendRaw(data[:10]), Stall(until=gate), SendRaw(data[10:]))
    with pytest.raises(TimeoutError):
        channel.receive(deadline=Deadline.after(0.05))
    gate.open()
    assert channel.receive(deadline=Deadline.after(5)).message == PONG


@pytest.mark.parametrize(
    ("script", "mid_frame"),
    [([Close()], False), ([Reset()], False), ([SendRaw(frame(PONG)[:5])], True), ([SendRaw(frame(PONG)[:17])], True)],
    ids=["closes", "resets", "cuts a header", "cuts a body"],
)
def test_a_peer_that_goes_away_is_peer_closed(connect, script: list[Step], mid_frame: bool) -> None:
    channel = connect(*script)
    with pytest.raises(PeerClosed) as raised:
        exchange(channel)
    assert raised.value.mid_frame == mid_frame


def test_a_refusal_sent_before_the_peer_closed_can_be_read_after_sending_failed(connect) -> None:
    channel = connect(Send(Refused(code="draining", message="stopping")), Close())
    with pytest.raises(PeerClosed):
        send_for_ever(channel, PING, timeout_s=5)  # what is sent before the daemon has closed is lost without a word
    assert channel.receive(deadline=Deadline.after(5)).message == Refused(code="draining", message="stopping")


def test_closing_gives_back_descriptors_of_a_frame_that_was_not_whole() -> None:
    """The fixture counts."""
    with channel_pair() as (client, daemon):
        reading, writing = os.pipe()
        data = frame(PONG, fd_count=2)
        socket.send_fds(daemon.connection, [data[:-1]], [reading, writing])
        os.close(reading)
        os.close(writing)
        with pytest.raises(TimeoutError):
            client.receive(deadline=Deadline.after(0))
        client.close()
        client.close()


def test_descriptors_of_a_message_that_cannot_be_sent_stay_the_callers() -> None:
    with channel_pair() as (client, _), pytest.raises(ProtocolError, match="descriptors"):
        client.send(PING, fds=[0])
    os.fstat(0)


def test_a_frame_with_wrong_descriptors_is_a_transfer_error() -> None:
    with channel_pair() as (client, daemon):
        socket.send_fds(daemon.connection, [frame(PONG)], [0])
        with pytest.raises(TransferError):
            client.receive()
