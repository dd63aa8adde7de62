"""The keeper's own endpoint: pages that cannot disagree, a server that cannot be in the way, imports that wait."""

import asyncio
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.daemons import (
    SCRIPTED,
    Daemon,
    ask,
    converse,
    modules_file,
    scripted_daemon,
    scripted_environment,
    start,
)
from tests.support.reports import READY, samples, value
from tests.support.scraping import Site
from weightcached.daemon.address import Address
from weightcached.daemon.http import CONNECTIONS_MAX, HEAD_MAX_BYTES, HttpServer
from weightcached.daemon.pages import Snapshot, page
from weightcached.daemon.seen import Seen
from weightcached.daemon.states import SERVING, State
from weightcached.protocol.errors import DaemonUnreachable
from weightcached.protocol.messages import Ping, Pong, Refused
from weightcached.protocol.places import Place

ANY_PORT = ("--metrics-address", "127.0.0.1:0")
PLACE = Place(Path("/run/weightcached"), "default", "host-tp0of1")


def site_of(daemon: Daemon) -> Site:
    return Site(daemon.wait_logged("metrics")["address"])


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[Daemon, Site]]:
    """A ready daemon with an endpoint."""
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name,
        scripted_daemon(model, Path(name) / "run", *ANY_PORT) as daemon,
    ):
        daemon.wait_until("ready")
        yield daemon, site_of(daemon)


class TestPages:
    """Pure: from one snapshot."""

    @pytest.mark.parametrize("state", State)
    def test_they_agree_in_every_state(self, state: State) -> None:
        snapshot = Snapshot((Seen(PLACE, report=READY.model_copy(update={"state": state.value})),))
        ready = value(samples(page("/metrics", snapshot).body.decode()), "ready") == 1
        assert ready == (page("/readyz", snapshot).status == 200) == (state in SERVING)
        assert page("/healthz", snapshot).status == 200
        for path in ("/healthz", "/readyz", "/status.json"):
            assert state.value in page(path, snapshot).body.decode()

    def test_all_have_to_be_ready_and_there_has_to_be_one(self) -> None:
        gone = Seen(PLACE, problem=DaemonUnreachable("nobody\nlistens"))
        assert page("/readyz", Snapshot(())).status == 503
        assert page("/readyz", Snapshot((Seen(PLACE, report=READY),))).status == 200
        reply = page("/readyz", Snapshot((Seen(PLACE, report=READY), gone)))
        assert (reply.status, len(reply.body.splitlines())) == (503, 2)


class TestServed:
    def test_every_page(self, served: tuple[Daemon, Site]) -> None:
        daemon, site = served
        metrics = site.ask("/metrics")
        assert (metrics.status, metrics.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert value(samples(metrics.text), "resident_bytes", place="default/host-tp0of1") == 4096
        assert site.ask("/healthz").status == 200
        assert (site.ask("/readyz").status, site.ask("/readyz").text) == (200, "default/host-tp0of1: ready\n")
        [status] = site.status()
        assert status["reachable"] is True
        assert status["pid"] == daemon.pid
        assert set(status) == {"reachable", *daemon.report().model_dump()}

    def test_what_engines_do_is_counted(self, served: tuple[Daemon, Site]) -> None:
        daemon, site = served
        before = site.metrics()
        with closing(daemon.connect()) as lease, closing(daemon.connect()) as refused, closing(daemon.connect()) as bad:
            _, fds = daemon.attach(lease, disk_fallbacks=2)
            fds.close()
            message = converse(refused, daemon.hello(receipts="1" * 64, digest="2" * 64, disk_fallbacks=3)).message
            assert isinstance(message, Refused)
            bad.connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            assert isinstance(bad.receive().message, Refused)
            after = site.metrics()

            def more(name: str, **labels: str) -> float:
                return (value(after, name, **labels) or 0) - (value(before, name, **labels) or 0)

            assert value(after, "leases", state="connected") == 1
            assert value(after, "leases", state="detached") == 0
            assert more("attaches_total", outcome="granted") == 1
            assert more("attaches_total", outcome="content_mismatch") == 1
            assert more("attach_seconds_count") == 1
            assert 0 < more("attach_seconds_sum") < 30
            assert more("protocol_errors_total", code="protocol") == 1
            assert more("disk_fallbacks_total") == 3  # one process, which said 2 and then 3
        assert value(after, "load_seconds_count") == 1

    def test_head_is_get_without_the_body(self, served: tuple[Daemon, Site]) -> None:
        _, site = served
        got, head = site.ask("/healthz"), site.ask("/healthz", method="HEAD")
        assert (head.status, head.text) == (200, "")
        assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.text))

    def test_a_query_is_passed_over(self, served: tuple[Daemon, Site]) -> None:
        assert served[1].ask("/readyz?verbose").status == 200

    @pytest.mark.parametrize(
        ("said", "status"),
        [
            (b"GET /none HTTP/1.1\r\n\r\n", 404),
            (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
            (b"GET /../status.json HTTP/1.1\r\n\r\n", 404),
            (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
            (b"GET /metrics\r\n\r\n", 400),
            (b"GET /metrics HTTP/2\r\n\r\n", 400),
            (b"\xff\xfe\r\n\r\n", 400),
            (b"\r\n\r\n", 400),
            # A web page whose name was pointed to this host: browsers say the name.
            (b"GET /status.json HTTP/1.1\r\nHost: rebound.example\r\n\r\n", 421),
            (b"GET /status.json HTTP/1.1\r\nhost:127.0.0.1.example:9410\r\n\r\n", 421),
            (b"GET /status.json HTTP/1.1\r\nHost: localhost\r\nHost: rebound.example\r\n\r\n", 421),
            (b"GET /status.json HTTP/1.1\r\nHost: localhost:9410\r\n\r\n", 200),
            (b"GET /status.json HTTP/1.1\r\nHost: [::1]:9410\r\n\r\n", 200),
            (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * HEAD_MAX_BYTES, 431),
        ],
    )
    def test_what_is_answered(self, served: tuple[Daemon, Site], said: bytes, status: int) -> None:
        answer = served[1].say(said)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
        assert served[1].ask("/healthz").status == 200

    def test_engines_are_answered_while_scrapers_hang_and_hammer(self, served: tuple[Daemon, Site]) -> None:
        daemon, site = served
        with ExitStack() as held, closing(daemon.connect()) as channel:
            assert ask(channel, Ping(token=0)) == Pong(token=0)
            hanging = [held.enter_context(closing(site.connect())) for _ in range(CONNECTIONS_MAX // 2)]
            over = threading.Event()

            def hammer() -> None:
                while not over.is_set():
                    site.say(b"GET /metrics HTTP/1.1\r\n\r\n")

            hammers = [threading.Thread(target=hammer) for _ in range(4)]
            for thread in hammers:
                thread.start()
            try:
                seconds = []
                for token in range(200):
                    began_s = time.perf_counter()
                    assert ask(channel, Ping(token=token)) == Pong(token=token)
                    seconds.append(time.perf_counter() - began_s)
            finally:
                over.set()
                for thread in hammers:
                    thread.join()
            assert len(hanging) == CONNECTIONS_MAX // 2
            assert sorted(seconds)[len(seconds) // 2] < 0.25  # a few pages' time, on a machine that does other things
            assert daemon.report().own_memory_nbytes < 64 << 20

    def test_there_are_only_so_many_connections(self, served: tuple[Daemon, Site]) -> None:
        _, site = served
        assert site.ask("/healthz").status == 200  # by now those of other tests have ended
        with ExitStack() as held:
            connections = [held.enter_context(closing(site.connect())) for _ in range(CONNECTIONS_MAX + 1)]
            # The one too many is ended at once; the others may be silent for a while.
            assert connections[-1].recv(1) == b""
            connections[0].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert connections[0].recv(12) == b"HTTP/1.1 200"


async def test_half_a_request_has_a_deadline() -> None:
    async def snapshot() -> Snapshot:
        return Snapshot((Seen(PLACE, report=READY),))

    server = HttpServer(snapshot, timeout_s=0.05)
    address = await server.start(Address("127.0.0.1", 0))
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET /metrics")
        assert await reader.read() == b""
        writer.close()
    finally:
        await server.close()


def test_a_load_can_be_watched_and_its_failure_read(model: Path, runtime_dir: Path) -> None:
    release = runtime_dir.parent / "release"
    os.mkfifo(release)
    failing = {"fail_at": "progress", "fail": {"code": "missing_shard", "message": "model-2.safetensors is gone"}}
    script = {"hang_at": "memory", "release": str(release), **failing}
    with scripted_daemon(model, runtime_dir, *ANY_PORT, script=script) as daemon:
        site = site_of(daemon)
        daemon.wait_logged("planned")
        hanging = os.open(release, os.O_RDWR)
        assert (site.ask("/healthz").status, site.ask("/readyz").status) == (200, 503)
        found = site.metrics()
        assert value(found, "state", state="loading") == 1
        assert value(found, "ready") == 0
        assert value(found, "resident_bytes") == 0
        os.write(hanging, b"!")  # stays there for a worker that has yet to look
        daemon.wait_until("failed")
        os.close(hanging)
        answer = site.ask("/readyz")
        assert (answer.status, site.ask("/healthz").status) == (503, 200)
        assert "model-2.safetensors is gone" in answer.text
        assert value(site.metrics(), "state", state="failed") == 1


def test_what_metrics_need_is_imported_after_the_socket_is_bound(model: Path, runtime_dir: Path) -> None:
    """Python says what it imports, in the order of the log."""
    environment = scripted_environment(runtime_dir, None) | {"PYTHONPROFILEIMPORTTIME": "1"}
    daemon = start(model, runtime_dir, *ANY_PORT, command=SCRIPTED, environment=environment)
    try:
        site_of(daemon)
    finally:
        daemon.stop()
    lines = daemon.log.lines

    def first(*words: str) -> int:
        return next(number for number, line in enumerate(lines) if all(word in line for word in words))

    assert first("import time:", "weightcached.daemon.server") < first('"message": "listening"')
    assert first('"message": "listening"') < first("import time:", "prometheus_client")
    assert first('"message": "listening"') < first("import time:", "weightcached.daemon.http")


def test_nothing_is_served_or_imported_unasked(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        daemon.stop(signal.SIGTERM)
    modules = modules_file(runtime_dir).read_text().split()
    assert "weightcached.daemon.endpoint" in modules
    assert not {"prometheus_client", "weightcached.daemon.http"} & set(modules)


def test_weights_are_served_where_metrics_cannot_be(model: Path, runtime_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with scripted_daemon(model, runtime_dir, "--metrics-address", address) as daemon:
            daemon.wait_logged("metrics cannot be served at this address: trying again", address=address)
            daemon.wait_until("ready")
            _, fds = daemon.attach()
            fds.close()
            taken.close()
            assert site_of(daemon) == Site(address)  # tried again
            assert Site(address).ask("/readyz").status == 200
