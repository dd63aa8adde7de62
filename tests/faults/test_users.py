"""Several users and one daemon: what one takes is its own share, who is not on the list gets nothing, groups count."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import Daemon, ask, connect, converse, scripted_daemon
from tests.support.forked import in_child
from tests.support.resources import anonymous_nbytes, more_descriptors_allowed
from tests.support.unprivileged import NOBODY, folder_for_everyone
from weightcached.protocol.framing import HEADER, MAGIC, PeerClosed
from weightcached.protocol.messages import PROTOCOL_VERSION, Grant, Ping, Pong, Refused, Report, Status

pytestmark = pytest.mark.root

GROUP = 4242
CONNECTIONS, LEASES, IN_FLIGHT_MIB = 40, 10, 4
KEEPER_MAX_BYTES = 64 << 20


@contextmanager
def serving(*arguments: str) -> Iterator[Daemon]:
    with folder_for_everyone() as folder:
        model = tiny_llama(folder / "model")
        with scripted_daemon(model, folder / "run", *arguments) as daemon:
            daemon.wait_until("ready")
            yield daemon


@contextmanager
def doing(work: Callable[[], None], *, uid: int = NOBODY) -> Iterator[None]:
    """While the block runs user ``uid`` (without rights) has done ``work``, and holds what it got."""
    ready_r, ready_w = os.pipe()
    end_r, end_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end_w)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            work()
            os.write(ready_w, b"r")
            os.read(end_r, 1)
        finally:
            os._exit(0)
    os.close(ready_w)
    os.close(end_r)
    try:
        assert os.read(ready_r, 1) == b"r", "the other user did not get that far"
        yield
    finally:
        os.close(ready_r)
        os.close(end_w)
        os.waitpid(pid, 0)


LIMITS = {
    "--connections-per-uid-max": CONNECTIONS,
    "--connections-max": 2 * CONNECTIONS,
    "--leases-per-uid-max": LEASES,
    "--in-flight-max": IN_FLIGHT_MIB,
}


def test_one_user_takes_all_it_may_and_others_are_served_as_before() -> None:
    limits = [word for option, value in LIMITS.items() for word in (option, str(value))]
    with serving("--allow-uid", str(NOBODY), *limits) as daemon:
        hello = daemon.hello(want="current")
        held: list[object] = []

        def take_it_all() -> None:
            leases = [connect(daemon.place) for _ in range(LEASES + 1)]
            answers = [converse(channel, hello).message for channel in leases]
            assert [type(answer) for answer in answers] == [Grant] * LEASES + [Refused]
            half = HEADER.pack(MAGIC, PROTOCOL_VERSION, 3, 64 * 1024, 0) + bytes(32 * 1024)
            sockets = []
            for _ in range(3 * CONNECTIONS):
                sockets.append(socket.socket(socket.AF_UNIX))
                sockets[-1].connect(str(daemon.place.socket_path))
                sockets[-1].setblocking(False)
                try:
                    sockets[-1].send(half)
                except OSError:  # over the limit it is told so, and closed
                    continue
            held.extend((leases, sockets))

        with doing(take_it_all), ExitStack() as closing:
            for _ in range(LEASES):
                channel = connect(daemon.place)
                closing.callback(channel.close)
                _, fds = daemon.attach(channel, want="current")
                fds.close()
            report = daemon.report()
            assert report.lease_count == 2 * LEASES
            assert report.connections <= CONNECTIONS + LEASES + 1
            assert anonymous_nbytes(daemon.pid) < KEEPER_MAX_BYTES


def test_at_its_limits_a_keeper_is_still_small() -> None:
    """Four users take everything that they may at the defaults: leases, connections, frames that are half through."""
    users = (NOBODY, 12345, 12346, 12347)
    with (
        more_descriptors_allowed(4096),
        serving(*(word for uid in users for word in ("--allow-uid", str(uid)))) as daemon,
    ):
        hello = daemon.hello(want="current", name="x" * 1024, disk_fallbacks=1)
        half = HEADER.pack(MAGIC, PROTOCOL_VERSION, 1, 64 * 1024, 0) + bytes(60 * 1024)
        held: list[object] = []

        def take_it_all() -> None:
            while True:
                channel = connect(daemon.place)
                held.append(channel)
                if not isinstance(converse(channel, hello).message, Grant):
                    break
            for _ in range(100):
                other = socket.socket(socket.AF_UNIX)
                other.connect(str(daemon.place.socket_path))
                other.setblocking(False)
                held.append(other)
                try:
                    other.send(half)
                except OSError:
                    continue

        with ExitStack() as busy:
            for uid in users:
                busy.enter_context(doing(take_it_all, uid=uid))
            channel = connect(daemon.place)
            assert ask(channel, Ping(token=1)) == Pong(token=1)
            report = ask(channel, Status())
            channel.close()
            assert isinstance(report, Report)
            assert 1900 < report.lease_count <= 2000
            print(f"{report.lease_count} leases, {report.own_memory_nbytes / 2**20:.1f} MiB")
            assert report.own_memory_nbytes < KEEPER_MAX_BYTES


def test_who_is_not_on_the_list_takes_nothing_from_those_who_are() -> None:
    """It can connect, because no mode bits say who may; it is told no, and its connections are gone at once."""
    with serving("--allow-uid", "12345", "--connections-max", "8") as daemon:

        def hammer() -> None:
            for _ in range(500):
                channel = connect(daemon.place)
                answer = ask(channel, Status())
                assert isinstance(answer, Refused)
                assert answer.code == "untrusted_client"
                with pytest.raises(PeerClosed):
                    channel.receive()
                channel.close()

        with doing(hammer):
            for _ in range(8):
                channel = connect(daemon.place)
                assert ask(channel, Ping(token=7)) == Pong(token=7)
                channel.close()
        assert daemon.report().attaches == {"untrusted_client": 500}


@pytest.mark.parametrize("groups", [[], [GROUP], [7, GROUP, 8], [*range(5000, 5600), GROUP]])
def test_members_of_a_group_are_served_however_they_are_members(groups: list[int]) -> None:
    with serving("--allow-gid", str(GROUP)) as daemon:

        def come() -> None:
            os.setgroups(groups)
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            answer = ask(connect(daemon.place), Status())
            assert isinstance(answer, Report if groups else Refused), answer

        in_child(come)


def test_the_socket_has_the_mode_that_whom_it_serves_needs(tmp_path: Path) -> None:
    with serving() as daemon:
        assert daemon.place.socket_path.stat().st_mode & 0o777 == 0o600
    with serving("--allow-gid", str(GROUP)) as daemon:
        assert daemon.place.socket_path.stat().st_mode & 0o777 == 0o666
        assert daemon.place.lock_path.stat().st_mode & 0o777 == 0o600
        assert daemon.place.directory.stat().st_mode & 0o022 == 0
