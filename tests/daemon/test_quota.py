"""Limits in all and for each user, counted and enforced: connections, leases, frames that are half through."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.daemons import Daemon, ask, connect, converse, scripted_daemon
from weightcached.daemon.leases import FallbackCount
from weightcached.daemon.quota import Quota
from weightcached.protocol.channel import Channel
from weightcached.protocol.framing import HEADER, encode_frame
from weightcached.protocol.messages import CLIENT_TO_DAEMON, Grant, Ping, Pong, Refused, Report, Status
from weightcached.protocol.peers import Peer


@given(
    st.integers(0, 20),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), max_size=40),
)
def test_no_order_of_taking_and_giving_goes_over_a_limit(in_all: int, each: int, wanted: list[tuple[int, int]]) -> None:
    quota = Quota(in_all=in_all, each=each)
    held: list[tuple[int, int]] = []
    for uid, amount in wanted:
        fits = sum(n for _, n in held) + amount <= in_all and sum(n for u, n in held if u == uid) + amount <= each
        assert quota.take(uid, amount) == fits
        if fits:
            held.append((uid, amount))
        elif held:
            quota.give(*held.pop(0))
        assert quota.used == sum(n for _, n in held)
        assert quota.used_by(uid) == sum(n for u, n in held if u == uid)
    for uid, amount in held:
        quota.give(uid, amount)
    assert quota.used == 0


def test_the_last_ones_are_for_root_and_for_ourselves() -> None:
    quota = Quota(in_all=10, each=6, reserve=3)
    stranger, another = 70_001, 70_002
    assert quota.take(stranger, 6)
    assert quota.take(another)
    assert not quota.take(another)
    assert quota.take(os.geteuid(), 2)
    assert quota.take(0)
    assert not quota.take(0)
    quota.give(stranger, 6)
    assert quota.take(another, 3)
    assert not quota.take(another)


def test_fallbacks_are_counted_once_for_each_process() -> None:
    count = FallbackCount()
    one, other = Peer(10, 0, 0), Peer(11, 0, 0)
    for peer, said in ((one, 0), (one, 2), (one, 2), (other, 1), (one, 3), (other, 1)):
        count.hear(peer, "engine", said)
    assert count.total == 4
    count.hear(one, "engine", 1)  # fewer than before: another process, with the pid of one that is gone
    assert count.total == 5
    count.hear(Peer(0, 0, 0), "a", 1)  # in other PID namespaces the name has to tell them apart
    count.hear(Peer(0, 0, 0), "b", 1)
    assert count.total == 7


@contextmanager
def connections(daemon: Daemon, count: int) -> Iterator[list[Channel]]:
    with ExitStack() as closing:
        channels = []
        for _ in range(count):
            channels.append(connect(daemon.place))
            closing.callback(channels[-1].close)
        yield channels


def test_one_user_may_have_so_many_connections(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, "--connections-per-uid-max", "3") as daemon:
        daemon.wait_until("ready")
        with connections(daemon, 6) as mine:
            answers = [ask(channel, Ping(token=1)) for channel in mine]
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        # One that asked for the status may not be gone yet.
        assert 2 <= answers.count(Pong(token=1)) <= 3
        assert len(refused) == 6 - answers.count(Pong(token=1))
        for one in refused:
            assert one.code == "daemon_not_ready"
            assert "this user has as many connections" in one.message
            assert "--connections-per-uid-max" in str(one.next_step)


def test_one_user_may_have_so_many_leases(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, "--leases-per-uid-max", "2") as daemon:
        daemon.wait_until("ready")
        with connections(daemon, 3) as [first, second, third]:
            for channel in (first, second):
                daemon.attach(channel)[1].close()
            frame = converse(third, daemon.hello(want="current"))
            frame.fds.close()
            refused = frame.message
            assert isinstance(refused, Refused)
            assert "as many leases" in refused.message
            assert daemon.report().lease_count == 2
            first.close()
            daemon.wait_logged("lease ended")
            with connections(daemon, 1) as [again]:
                frame = converse(again, daemon.hello(want="current"))
                frame.fds.close()
                assert isinstance(frame.message, Grant)


def test_frames_that_are_half_sent_are_limited_for_each_user(model: Path, runtime_dir: Path) -> None:
    """Eight frames of 64 KiB are half a MiB: what one user may have under way at a limit of one MiB."""
    half = HEADER.pack(b"WCD1", 1, 3, 64 * 1024, 0) + b"\0"
    with scripted_daemon(model, runtime_dir, "--in-flight-max", "1") as daemon:
        daemon.wait_until("ready")
        with connections(daemon, 9) as [*half_sent, one_more]:
            for channel in half_sent:
                assert ask(channel, Ping(token=1)) == Pong(token=1)
                channel.connection.sendall(half)
            assert isinstance(daemon.report(), Report)  # small requests are as welcome as ever
            one_more.connection.sendall(half)
            refused = one_more.receive().message
            assert isinstance(refused, Refused)
            assert "half received or half sent" in refused.message
        with connections(daemon, 1) as [again]:  # what has ended makes room
            again.connection.sendall(half + bytes(64 * 1024 - 1))
            refused = again.receive().message
            assert isinstance(refused, Refused)
            assert refused.code == "protocol"


def test_answers_that_nobody_reads_are_limited_too(model: Path, runtime_dir: Path) -> None:
    """Reports to a client that asks and does not read wait in our memory: only so much of it, and others do not."""
    with scripted_daemon(model, runtime_dir, "--in-flight-max", "1", "--exchange-timeout", "60") as daemon:
        daemon.wait_until("ready")
        with connections(daemon, 100) as many, ExitStack() as leases:
            for number in range(60):
                lease = connect(daemon.place)
                leases.callback(lease.close)
                daemon.attach(lease, name="x" * 64, pid=number)[1].close()
            question = encode_frame(CLIENT_TO_DAEMON, Status())
            for channel in many:
                channel.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                channel.connection.setblocking(False)
                try:
                    while True:
                        channel.connection.send(question)
                except BlockingIOError:
                    continue
            daemon.wait_logged("dropped")
            with connections(daemon, 1) as [other]:
                assert ask(other, Ping(token=1)) == Pong(token=1)
