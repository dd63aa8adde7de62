"""A lying client against a real daemon: it refuses with a reason, keeps nothing, and serves everybody else meanwhile.

Around every test an engine holds a lease, and the daemon's descriptors and memory are compared.
"""

import errno
import os
import select
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import Daemon, ask, scripted_daemon
from tests.support.eventually import eventually
from tests.support.resources import anonymous_nbytes, more_descriptors_allowed, open_fds
from weightcached.client import WeightSet, attach
from weightcached.protocol.channel import Channel
from weightcached.protocol.errors import DaemonNotReady
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import HEADER, PeerClosed
from weightcached.protocol.messages import CLIENT_TO_DAEMON, Grant, Message, Ping, Pong, Refused, Report, Status
from weightcached.protocol.testing import (
    Drip,
    Flood,
    HalfClose,
    LyingClient,
    Receive,
    ReceiveToEnd,
    Send,
    SendRaw,
    frame,
    frame_lies,
)

EXCHANGE_TIMEOUT_S = 1.0
PING, PONG = Ping(token=7), Pong(token=7)
MEMORY_SLACK_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Daemon]:
    """A daemon that is ready and idle: its helpers have come and gone."""
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as folder,
        scripted_daemon(model, Path(folder) / "run", "--exchange-timeout", str(EXCHANGE_TIMEOUT_S)) as started,
    ):
        started.wait_until("ready")
        started.wait_logged("content digest")
        eventually(lambda: not Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text())
        yield started


@pytest.fixture(scope="module")
def engine(served: Daemon) -> Iterator[Channel]:
    """An engine that holds a lease all the time."""
    channel = served.connect()
    _, fds = served.attach(channel, want="current")
    fds.close()
    for _ in range(100):  # whoever left before has been forgotten by the end of it
        assert ask(channel, PING) == PONG
    yield channel
    channel.close()


@pytest.fixture(scope="module")
def held(served: Daemon, engine: Channel) -> tuple[int, int]:
    """How many descriptors, and bytes of memory, the daemon has with that engine and no other client."""
    return len(open_fds(served.pid)), anonymous_nbytes(served.pid)


@pytest.fixture(autouse=True)
def _unharmed(served: Daemon, engine: Channel, held: tuple[int, int]) -> Iterator[None]:
    yield
    descriptors, memory_nbytes = held
    assert ask(engine, PING) == PONG, "the engine lost its lease"
    eventually(lambda: len(open_fds(served.pid)) == descriptors)
    assert anonymous_nbytes(served.pid) < memory_nbytes + MEMORY_SLACK_BYTES


def lying(served: Daemon) -> LyingClient:
    return LyingClient(served.place.socket_path)


@contextmanager
def a_pipe() -> Iterator[tuple[int, int]]:
    with OwnedFds(os.pipe()) as fds:
        yield fds[0], fds[1]


def refused(answers: list[Message]) -> Refused:
    """The only answer, which is a refusal."""
    (answer,) = answers
    assert isinstance(answer, Refused), answer
    return answer


LIES = sorted(frame_lies(PING, pickle_target="x"))


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_frame_is_refused_with_a_reason(served: Daemon, lie: str, tmp_path: Path) -> None:
    target = tmp_path / "pickled"
    data = frame_lies(served.hello(), pickle_target=str(target))[lie]
    with lying(served) as client:
        refusal = refused(client.run(SendRaw(data), ReceiveToEnd()))
    assert refusal.code in ("protocol", "transfer")
    assert refusal.found or refusal.expected
    assert not target.exists()


def test_descriptors_are_refused_whatever_they_come_with(served: Daemon) -> None:
    """A client has none to send. The daemon keeps no copy: our end sees the pipe's end once all are closed."""
    frames = [frame(PING), frame(PING, fd_count=3), *frame_lies(PING, pickle_target="/dev/null").values()]
    for data in frames:
        with a_pipe() as (reading, writing), lying(served) as client:
            mine = client.wire.connection.fileno()
            answers = client.run(SendRaw(data, [writing, mine, writing]), ReceiveToEnd())
            assert refused(answers).code == "transfer"
            os.dup2(reading, writing)  # closes our writing end
            assert select.select([reading], [], [], 5)[0], "somebody holds another writing end"
            assert os.read(reading, 1) == b""


@pytest.mark.parametrize("position", [1, HEADER.size - 1, HEADER.size, HEADER.size + 1])
def test_descriptors_in_the_middle_of_a_frame_are_refused(served: Daemon, position: int) -> None:
    data = frame(PING)
    with a_pipe() as (_, writing), lying(served) as client:
        answers = client.run(SendRaw(data[:position]), SendRaw(data[position:], [writing]), ReceiveToEnd())
    assert refused(answers).code == "transfer"


@pytest.mark.parametrize("sent", [1, 252])
def test_any_number_of_descriptors_is_refused(served: Daemon, sent: int) -> None:
    with a_pipe() as (_, writing), lying(served) as client:
        assert refused(client.run(SendRaw(frame(PING), [writing] * sent), ReceiveToEnd())).code == "transfer"


def test_a_frame_cut_short_anywhere_is_the_end_of_that_client(served: Daemon) -> None:
    data = frame(PING)
    for length in range(len(data)):
        with lying(served) as client:
            client.run(SendRaw(data[:length]))
        with lying(served) as client:
            assert client.run(SendRaw(data[:length]), HalfClose(), ReceiveToEnd()) == []


def test_requests_in_one_piece_are_answered_in_order(served: Daemon) -> None:
    together = frame(PING) + frame(Status()) + frame(served.hello(want="current")) + frame(Ping(token=8))
    with lying(served) as client:
        answers = client.run(SendRaw(together), Receive(), Receive(), Receive(), Receive())
        assert [type(answer) for answer in answers] == [Pong, Report, Grant, Pong]
        assert [len(received.fds) for received in client.wire.frames] == [0, 0, 2, 0]


def test_a_half_closed_client_is_still_answered(served: Daemon) -> None:
    with lying(served) as client:
        assert client.run(Send(PING), HalfClose(), ReceiveToEnd()) == [PONG]


def test_silent_and_dripping_clients_have_one_deadline_and_delay_nobody(served: Daemon) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(lying(served)) for _ in range(100)]
        dripping = stack.enter_context(lying(served))
        start = time.monotonic()
        with lying(served) as honest:
            assert honest.run(Send(PING), Receive()) == [PONG]
        assert time.monotonic() - start < 0.5
        with suppress(PeerClosed):
            dripping.run(Drip(frame(PING), every_s=0.9 * EXCHANGE_TIMEOUT_S))
        for client in (dripping, *silent):
            assert refused(client.run(ReceiveToEnd())).code == "protocol"
        assert EXCHANGE_TIMEOUT_S * 0.9 < time.monotonic() - start < EXCHANGE_TIMEOUT_S + 5


@pytest.mark.parametrize("request_name", ["Ping", "Status"])
def test_a_client_that_never_reads_is_dropped(served: Daemon, request_name: str) -> None:
    request: Message = PING if request_name == "Ping" else Status()
    with lying(served) as client:
        with suppress(PeerClosed):  # dropped while it still asked
            client.run(Flood(frame(request) * 50, patience_s=4 * EXCHANGE_TIMEOUT_S))
        with pytest.raises(ConnectionError):
            client.run(*[Receive()] * 1_000_000)


def exchange_s(served: Daemon) -> float:
    """Seconds from connecting to the answer."""
    start = time.monotonic()
    with lying(served) as client:
        assert client.run(Send(PING), Receive()) == [PONG]
    return time.monotonic() - start


@contextmanager
def in_background(work: Callable[[], None]) -> Iterator[threading.Event]:
    """Call ``work`` again and again until the block ends; the event is set once it was called."""
    running, stop = threading.Event(), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            work()
            running.set()

    thread = threading.Thread(target=loop, name="hostile")
    thread.start()
    try:
        assert running.wait(20)
        yield running
    finally:
        stop.set()
        thread.join()


def test_thousands_of_pipelined_requests_are_answered_and_delay_nobody(served: Daemon) -> None:
    count = 5_000
    alone_s = statistics.median(exchange_s(served) for _ in range(50))
    with lying(served) as hog:
        sending = threading.Thread(target=lambda: hog.run(SendRaw(frame(PING) * count)))
        reading = threading.Thread(target=lambda: hog.run(*[Receive()] * count))
        sending.start()
        reading.start()
        seconds = []
        while reading.is_alive():
            seconds.append(exchange_s(served))
        sending.join()
        assert hog.wire.messages == [PONG] * count
    print(f"an exchange: {alone_s * 1e3:.2f} ms alone, {statistics.median(seconds) * 1e3:.2f} ms beside the pipeline")
    assert statistics.median(seconds) < alone_s + 0.010


def test_the_costliest_lawful_request_delays_others_by_milliseconds(served: Daemon) -> None:
    """Every entry compared, as many items as a body may hold: others wait for no more than one such frame."""
    hello = served.hello()
    names = list(hello.config)
    config = {name: [0] * (CLIENT_TO_DAEMON.items_max // len(names) - 3) for name in names}
    costly = frame(hello.model_copy(update={"config": config, "fingerprint": "0" * 64}))

    def ask_at_great_cost() -> None:
        with lying(served) as client:
            assert refused(client.run(SendRaw(costly), ReceiveToEnd())).code == "config_mismatch"

    alone_s = statistics.median(exchange_s(served) for _ in range(50))
    with in_background(ask_at_great_cost):
        crowded_s = statistics.median(exchange_s(served) for _ in range(100))
    print(f"an exchange: {alone_s * 1e3:.2f} ms alone, {crowded_s * 1e3:.2f} ms beside costly requests")
    assert crowded_s < alone_s + 0.010


def test_garbage_without_end_changes_nothing_for_others(served: Daemon) -> None:
    def send_garbage() -> None:
        with lying(served) as client, suppress(PeerClosed):
            client.run(SendRaw(os.urandom(4096)), ReceiveToEnd())

    with in_background(send_garbage):
        for _ in range(20):
            grant, fds = served.attach(want="current")
            with fds:
                assert len(fds) == 1 + len(grant.segments)


def test_a_full_backlog_is_waited_for_and_then_reported(served: Daemon) -> None:
    """A daemon that is stopped accepts nobody: connecting says EAGAIN once its backlog is full."""
    attached: list[WeightSet] = []
    late = threading.Thread(target=lambda: attached.append(attach_to(served, timeout_s=30)))
    with ExitStack() as crowd, more_descriptors_allowed(8192):
        os.kill(served.pid, signal.SIGSTOP)
        try:
            while not fill(crowd, served):
                pass
            with pytest.raises(DaemonNotReady, match="backlog"):
                attach_to(served, timeout_s=0.2)
            late.start()
            crowd.close()
        finally:
            os.kill(served.pid, signal.SIGCONT)
        late.join()
    with attached[0] as weights:
        assert weights.source == "daemon"


def attach_to(served: Daemon, *, timeout_s: float) -> WeightSet:
    runtime_dir = served.place.runtime_dir
    return attach(served.model_dir, runtime_dir=runtime_dir, mode="require", want="current", timeout_s=timeout_s)


def fill(crowd: ExitStack, served: Daemon) -> bool:
    """One more connection in the backlog; true when there was no room."""
    connection = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
    number = connection.connect_ex(str(served.place.socket_path))
    assert number in (0, errno.EAGAIN)
    return number == errno.EAGAIN
