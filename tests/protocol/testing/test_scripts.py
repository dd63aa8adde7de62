"""The lying daemon and the lying client: their documentation is true, and a script does to the peer what it says."""

import errno
import os
import pickle
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.resources import nothing_left_behind
from weightcached.protocol import testing
from weightcached.protocol.errors import ProtocolError
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.messages import Ping, Pong, Status
from weightcached.protocol.testing import (
    Close,
    Die,
    Drip,
    Flood,
    Gate,
    HalfClose,
    LyingClient,
    LyingDaemon,
    Open,
    Receive,
    ReceiveToEnd,
    Repeat,
    Reset,
    Send,
    SendRaw,
    Stall,
    frame,
    pickle_that_creates,
    sealed_memory,
)

PING, PONG = Ping(token=7), Pong(token=7)


@pytest.fixture
def path(tmp_path) -> Iterator[Path]:
    with nothing_left_behind():
        yield tmp_path / "lying.sock"
    assert not list(tmp_path.iterdir())


def test_the_documented_example_runs_as_written() -> None:
    assert testing.__doc__ is not None
    example = testing.__doc__.split("::\n", 1)[1].split("\nTo test a client", 1)[0]
    exec(compile(textwrap.dedent(example), "example", "exec"), {})


def test_each_connection_gets_the_next_script_and_the_last_serves_the_rest(path: Path) -> None:
    with LyingDaemon(path, [Send(Pong(token=1))], [Send(Pong(token=2))]) as daemon:
        for expected in (1, 2, 2):
            with LyingClient(path) as client:
                assert client.run(ReceiveToEnd()) == [Pong(token=expected)]
        assert len(daemon.wires) == 3


def test_the_daemon_remembers_what_clients_said(path: Path) -> None:
    with LyingDaemon(path, [Receive(), Receive(), Send(PONG)]) as daemon:
        with LyingClient(path) as client:
            client.run(Send(PING), Send(Status()), ReceiveToEnd())
        assert daemon.wires[0].messages == [PING, Status()]


def test_what_a_step_raises_is_raised_in_the_test(path: Path) -> None:
    with pytest.raises(ProtocolError), LyingDaemon(path, [Receive()]), LyingClient(path) as client:
        client.run(SendRaw(b"garbage" * 4), ReceiveToEnd())


def test_a_stalled_script_ends_with_the_daemon(path: Path) -> None:
    stalled = Gate()
    with LyingDaemon(path, [Open(stalled), Stall()]), LyingClient(path) as client:
        stalled.wait()
        assert client.wire.connection.fileno() >= 0


def test_a_stalled_script_goes_on_when_its_gate_opens(path: Path) -> None:
    gate = Gate()
    with LyingDaemon(path, [Stall(until=gate), Send(PONG)]), LyingClient(path) as client:
        with pytest.raises(BlockingIOError):
            client.wire.connection.recv(1)
        gate.open()
        assert client.run(Receive()) == [PONG]


def test_a_gate_that_stays_shut_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        Gate().wait(timeout_s=0)


def test_a_script_has_one_deadline(path: Path) -> None:
    with pytest.raises(TimeoutError), LyingDaemon(path, [Receive()], timeout_s=0.05), LyingClient(path) as client:
        client.run(ReceiveToEnd())


def test_dripped_bytes_make_a_frame(path: Path) -> None:
    with LyingDaemon(path, [Drip(frame(PONG), nbytes_each=3, every_s=0.001)]), LyingClient(path) as client:
        assert client.run(Receive()) == [PONG]


def test_a_flood_ends_when_nobody_reads(path: Path) -> None:
    with LyingDaemon(path, [Stall()]), LyingClient(path) as client:
        client.run(Flood(frame(PING), patience_s=0))
        with pytest.raises(BlockingIOError):
            client.wire.connection.send(b"x")


def test_a_repeated_step_ends_when_the_peer_leaves(path: Path) -> None:
    with LyingDaemon(path, [Repeat(Send(PONG), every_s=0.001)]), LyingClient(path) as client:
        assert client.run(Receive(), Receive(), Receive()) == [PONG] * 3


def test_descriptors_arrive_and_are_closed_with_the_wire(path: Path) -> None:
    sealed = sealed_memory(b"weights")
    try:
        with LyingDaemon(path, [Send(PONG, fds=[sealed, sealed])]), LyingClient(path) as client:
            client.run(Receive())
            received = client.wire.frames[0].fds
            assert [os.pread(received[position], 100, 0) for position in (0, 1)] == [b"weights"] * 2
    finally:
        os.close(sealed)


def test_a_half_closed_connection_still_hears(path: Path) -> None:
    with LyingDaemon(path, [ReceiveToEnd(), Send(PONG)]), LyingClient(path) as client:
        assert client.run(Send(PING), HalfClose(), Receive()) == [PONG]


def test_close_is_the_end_and_reset_a_reset(path: Path) -> None:
    with LyingDaemon(path, [Close()], [Reset()]):
        with LyingClient(path) as client, pytest.raises(PeerClosed) as closed:
            client.run(Receive())
        assert closed.value.__cause__ is None
        with LyingClient(path) as client, pytest.raises(PeerClosed) as closed:
            client.run(Send(PING), Receive())
        assert isinstance(closed.value.__cause__, ConnectionResetError)


def test_a_dead_daemon_leaves_its_socket_and_refuses(path: Path) -> None:
    with LyingDaemon(path, [Stall()], [Die()]):
        with LyingClient(path) as other, LyingClient(path) as client:
            assert client.run(ReceiveToEnd()) == []
            assert other.run(ReceiveToEnd()) == []
        assert path.is_socket()
        with socket.socket(socket.AF_UNIX) as late:
            assert late.connect_ex(str(path)) == errno.ECONNREFUSED


def test_the_pickle_would_have_its_effect(tmp_path: Path) -> None:
    """Or the tests that send it would prove nothing."""
    target = tmp_path / "pickled"
    pickle.loads(pickle_that_creates(str(target))).close()  # noqa: S301
    assert target.exists()
