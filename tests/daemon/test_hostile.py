"""Silent, dripping, broken, greedy and hostile clients of a real daemon: each is dropped, no other notices."""

import array
import contextlib
import itertools
import os
import re
import resource
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import Daemon, ask, connect, scripted_daemon
from tests.support.eventually import eventually
from tests.support.resources import open_fds
from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.framing import HEADER, MAGIC, PeerClosed, encode_frame
from weightcached.protocol.messages import (
    CLIENT_BODY_MAX_BYTES,
    CLIENT_TO_DAEMON,
    DAEMON_TO_CLIENT,
    PROTOCOL_VERSION,
    Ping,
    Pong,
    Refused,
    Report,
    Status,
)

EXCHANGE_TIMEOUT_S = 1.0
PING = encode_frame(CLIENT_TO_DAEMON, Ping(token=5))


@pytest.fixture(scope="module")
def daemon(model: Path) -> Iterator[Daemon]:
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as folder,
        scripted_daemon(model, Path(folder) / "run", "--exchange-timeout", str(EXCHANGE_TIMEOUT_S)) as started,
    ):
        started.wait_logged("content digest")
        eventually(lambda: not children_of(started))
        IDLE_FDS[started.pid] = len(open_fds(started.pid))
        yield started


IDLE_FDS: dict[int, int] = {}
"""How many descriptors a daemon had before anybody connected."""


def children_of(daemon: Daemon) -> str:
    return Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text()


def nothing_is_left(daemon: Daemon) -> None:
    """Wait until the daemon has exactly the descriptors that it had before anybody connected."""
    eventually(lambda: len(open_fds(daemon.pid)) == IDLE_FDS[daemon.pid])


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[socket.socket]:
    """A connected socket without any protocol on it."""
    with raw_to(daemon) as connection:
        yield connection


def raw_to(daemon: Daemon) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(str(daemon.place.socket_path))
    return connection


def answer(raw: socket.socket) -> object:
    """The next frame's message on a raw socket."""
    channel = Channel(raw.dup(), outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
    try:
        with (frame := channel.receive(deadline=Deadline.after(30))).fds:
            return frame.message
    finally:
        channel.close()
        raw.settimeout(30)


def refused_and_closed(raw: socket.socket) -> Refused:
    message = answer(raw)
    assert isinstance(message, Refused), message
    with contextlib.suppress(ConnectionResetError):  # what it had not read of ours is thrown away
        assert raw.recv(1) == b""
    return message


def frame(
    *, magic: bytes = MAGIC, version: int = PROTOCOL_VERSION, number: int = 3, nbytes: int, fds: int = 0
) -> bytes:
    return HEADER.pack(magic, version, number, nbytes, fds)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(magic=b"HTTP", nbytes=0), "protocol"),
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "protocol"),
        (frame(version=PROTOCOL_VERSION + 1, nbytes=10), "protocol"),
        (frame(number=99, nbytes=0), "protocol"),
        (frame(number=64, nbytes=0), "protocol"),  # a daemon's message
        (frame(nbytes=0), "protocol"),  # a Ping without a body
        (frame(nbytes=CLIENT_BODY_MAX_BYTES + 1), "protocol"),
        (frame(nbytes=2**32 - 1), "protocol"),
        (frame(nbytes=0, fds=1), "protocol"),
        (frame(nbytes=0, fds=2**32 - 1), "protocol"),
        (frame(nbytes=4) + b"\xc1\xc1\xc1\xc1", "protocol"),  # not msgpack
        (frame(nbytes=5) + b"\xdd\xff\xff\xff\xff", "protocol"),  # an array of four billion
        (frame(nbytes=3000) + b"\x91" * 3000, "protocol"),  # nested deeply
        (frame(nbytes=1) + b"\x80", "protocol"),  # a map that lacks the token
        (frame(nbytes=17) + b"\x82\xa5token\x01\xa5extra\x01\x00\x00", "protocol"),
        (frame(nbytes=10) + b"\x81\xa5token\xa1x\x00", "protocol"),  # a wrong type
        (frame(nbytes=8) + b"\x81\xa5token\xff", "protocol"),  # negative
    ],
)
def test_anything_but_a_good_frame_is_answered_and_ends_the_connection(
    raw: socket.socket, data: bytes, code: str
) -> None:
    raw.sendall(data)
    assert refused_and_closed(raw).code == code


@pytest.mark.parametrize("count", [1, 3])
def test_a_client_that_sends_descriptors_is_refused_and_they_are_closed(
    daemon: Daemon, raw: socket.socket, count: int
) -> None:
    ours, theirs = os.pipe()
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs] * count))]
        raw.sendmsg([PING], rights)
    finally:
        os.close(theirs)
    assert refused_and_closed(raw).code == "transfer"
    os.set_blocking(ours, True)
    assert os.read(ours, 1) == b""  # end of file: the daemon holds no copy of the writing end
    os.close(ours)
    nothing_is_left(daemon)


def test_two_frames_in_one_write_are_two_requests(raw: socket.socket) -> None:
    raw.sendall(PING + encode_frame(CLIENT_TO_DAEMON, Ping(token=6)))
    assert answer(raw) == Pong(token=5)
    assert answer(raw) == Pong(token=6)


def test_a_frame_byte_by_byte_is_a_frame(raw: socket.socket) -> None:
    for position in range(len(PING)):
        raw.sendall(PING[position : position + 1])
    assert answer(raw) == Pong(token=5)


def test_a_silent_client_is_dropped_in_time(raw: socket.socket) -> None:
    started = time.monotonic()
    assert refused_and_closed(raw).code == "protocol"
    assert EXCHANGE_TIMEOUT_S * 0.9 < time.monotonic() - started < EXCHANGE_TIMEOUT_S + 5


def test_a_dripping_client_gains_nothing_by_each_byte(raw: socket.socket) -> None:
    """One deadline for the whole exchange: a byte every 0.4 of it does not begin it anew."""
    started = time.monotonic()
    dropped = False
    for position in range(len(PING)):
        raw.settimeout(EXCHANGE_TIMEOUT_S * 0.4)
        try:
            raw.sendall(PING[position : position + 1])
            dropped = bool(raw.recv(1, socket.MSG_PEEK))  # an answer, though no request was complete
        except TimeoutError:
            continue
        except ConnectionError:
            dropped = True
        if dropped:
            break
    assert dropped
    assert time.monotonic() - started < 3 * EXCHANGE_TIMEOUT_S


def test_a_client_that_leaves_in_the_middle_is_forgotten(daemon: Daemon) -> None:
    for cut in (0, 1, HEADER.size, HEADER.size + 1, len(PING) - 1):
        with raw_to(daemon) as connection:
            connection.sendall(PING[:cut])
    nothing_is_left(daemon)


def test_a_client_that_does_not_read_its_answers_is_dropped(daemon: Daemon) -> None:
    """It asks and asks; its answers fill the socket, then the daemon stops reading, then the deadline is over."""
    request = encode_frame(CLIENT_TO_DAEMON, Status())
    with raw_to(daemon) as greedy:
        with contextlib.suppress(ConnectionError, TimeoutError):
            greedy.settimeout(10)
            while True:
                greedy.sendall(request * 100)
        daemon.wait_logged("dropped a client that did not read its answer")


def median_exchange_s(daemon: Daemon, *, rounds: int = 60) -> float:
    """Connect, ask, be answered, leave: the median over many."""
    seconds = []
    for _ in range(rounds):
        started = time.monotonic()
        channel = connect(daemon.place)
        try:
            assert ask(channel, Ping(token=1)) == Pong(token=1)
        finally:
            channel.close()
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds)


def test_hostile_clients_do_not_delay_others(daemon: Daemon) -> None:
    """200 silent, 50 dripping, one that pipelines without end, and one that sends rubbish, against one that behaves."""
    alone_s = median_exchange_s(daemon)
    stop = threading.Event()
    hostile = [threading.Thread(target=one, args=(daemon, stop)) for one in (drip, flood, rubbish, idle)]
    for thread in hostile:
        thread.start()
    try:
        # The best of five: a busy machine delays some, a daemon that can be starved delays all.
        crowded_s = min(median_exchange_s(daemon, rounds=20) for _ in range(5))
    finally:
        stop.set()
        for thread in hostile:
            thread.join()
    print(f"one exchange: {alone_s * 1e3:.2f} ms alone, {crowded_s * 1e3:.2f} ms in the crowd")
    assert crowded_s < alone_s + 0.010


def idle(daemon: Daemon, stop: threading.Event) -> None:
    connections = [raw_to(daemon) for _ in range(200)]
    stop.wait()
    for connection in connections:
        connection.close()


def drip(daemon: Daemon, stop: threading.Event) -> None:
    connections = [raw_to(daemon) for _ in range(50)]
    for byte in PING[:-1]:
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(bytes([byte]))
        if stop.wait(EXCHANGE_TIMEOUT_S / 50):
            break
    for connection in connections:
        connection.close()


def flood(daemon: Daemon, stop: threading.Event) -> None:
    """Requests without end, as fast as the socket takes them, so that the daemon always finds the next one waiting."""
    with raw_to(daemon) as connection:

        def read() -> None:
            with contextlib.suppress(OSError):
                while connection.recv(1 << 20):
                    pass

        reader = threading.Thread(target=read)
        reader.start()
        while not stop.is_set():
            connection.sendall(PING * 1000)
        connection.shutdown(socket.SHUT_RDWR)
        reader.join()


def rubbish(daemon: Daemon, stop: threading.Event) -> None:
    while not stop.wait(0.002):
        with raw_to(daemon) as connection:
            connection.sendall(struct.pack("<4sHHII", MAGIC, PROTOCOL_VERSION, 1, 3, 0) + b"\x91\x91\x91")
            with contextlib.suppress(ConnectionError):
                connection.recv(4096)


@contextlib.contextmanager
def limited_to(daemon: Daemon, more: int) -> Iterator[None]:
    """The daemon may open only so many descriptors more than it has now."""
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    taken = open_fds(daemon.pid)
    free = (number for number in itertools.count() if number not in taken)
    limit = next(itertools.islice(free, more, None))  # the kernel gives numbers below the limit, lowest first
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)


def test_a_load_without_descriptors_is_tried_again_when_there_may_be_some(model: Path, runtime_dir: Path) -> None:
    """Clients may have had them all: nothing is wrong with the daemon or the checkpoint."""
    release = runtime_dir.parent / "release"
    os.mkfifo(release)
    script = {"hang_at": "job", "release": str(release), "only_attempts": 1, "attempts": f"{release}.attempts"}
    with scripted_daemon(model, runtime_dir, script=script) as daemon:
        writer = os.open(release, os.O_WRONLY)  # the worker has opened it: it is at its point
        with limited_to(daemon, 0):
            os.close(writer)
            daemon.wait_logged("loading again")
        daemon.wait_until("ready")
        (again,) = [line for line in daemon.log.lines if "loading again" in line]
        assert "no descriptor left to load with" in again


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_without_descriptors_the_daemon_waits_and_does_not_spin(daemon: Daemon) -> None:
    with limited_to(daemon, 3), contextlib.ExitStack() as clients:
        crowd = [clients.enter_context(raw_to(daemon)) for _ in range(20)]
        daemon.wait_logged("cannot accept: clients wait")
        cpu_before_s = cpu_s(daemon.pid)
        # All stay silent: their places become free one exchange after the other, which takes seconds.
        for connection in crowd[:9]:
            assert refused_and_closed(connection).code == "protocol"
        assert cpu_s(daemon.pid) - cpu_before_s < 0.5
    daemon.wait_logged("accepting again")
    nothing_is_left(daemon)
    complaints = [record for record in daemon.log.records() if record["message"].startswith("cannot accept")]
    again = [record for record in daemon.log.records() if record["message"] == "accepting again"]
    assert len(complaints) <= len(again) + 1  # one for each time it ran out, not one for each attempt


def test_a_grant_that_finds_no_descriptor_is_refused_not_broken(daemon: Daemon) -> None:
    channel = connect(daemon.place)
    try:
        assert ask(channel, Ping(token=1)) == Pong(token=1)  # accepted
        with limited_to(daemon, 0):
            refused = ask(channel, daemon.hello())
    finally:
        channel.close()
    assert isinstance(refused, Refused)
    assert refused.code == "daemon_not_ready"
    assert "descriptor" in refused.message
    _, fds = daemon.attach()
    fds.close()


def test_descriptors_are_the_same_before_and_after(daemon: Daemon) -> None:
    for _ in range(20):
        _, fds = daemon.attach()
        fds.close()
        with raw_to(daemon) as connection:
            connection.sendall(frame(nbytes=5) + b"\xdd\xff\xff\xff\xff")
            refused_and_closed(connection)
    nothing_is_left(daemon)


def test_one_connection_more_than_allowed_is_told_so(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, "--connections-max", "2") as daemon:
        daemon.wait_logged("state", state="ready")
        first, second = daemon.connect(), daemon.connect()
        try:
            for channel in (first, second):
                assert isinstance(ask(channel, Status()), Report)
            third = daemon.connect()
            told = third.receive(deadline=Deadline.after(30)).message  # without being asked
            assert isinstance(told, Refused)
            assert told.code == "daemon_not_ready"
            with pytest.raises(PeerClosed):
                third.receive(deadline=Deadline.after(30))
            third.close()
        finally:
            first.close()
            second.close()
        eventually(lambda: isinstance(status_or_refusal(daemon), Report))


def status_or_refusal(daemon: Daemon) -> object:
    channel = daemon.connect()
    try:
        return ask(channel, Status())
    finally:
        channel.close()


def test_an_error_of_ours_is_answered_logged_and_costs_one_connection(model: Path, runtime_dir: Path) -> None:
    """A handler that raises: the cause goes to the client, the traceback to the log, the daemon goes on."""
    with scripted_daemon(model, runtime_dir, breaking="report") as daemon:
        daemon.wait_logged("state", state="ready")
        channel = daemon.connect()
        try:
            refused = ask(channel, Status())
        finally:
            channel.close()
        assert isinstance(refused, Refused)
        assert refused.code == "internal"
        assert "ZeroDivisionError" in str(refused.found)
        record = daemon.wait_logged("a request met an error of ours")
        assert re.search(r"Traceback.*ZeroDivisionError", record["exc_info"], re.S)
        _, fds = daemon.attach()
        fds.close()
