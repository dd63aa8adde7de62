"""The lease: the daemon's end is seen at once and told, a lease given back is gone, a forked child has none.

Real daemons (with a scripted worker: what is loaded does not matter here), and a lying one for what no daemon does.
"""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.daemons import Daemon, scripted_daemon
from tests.support.forked import in_child
from tests.support.resources import memfd_mappings, open_fds
from weightcached.client import WeightSet, attach
from weightcached.client.lease import Lease
from weightcached.protocol.errors import DaemonNotReady, DaemonUnreachable
from weightcached.protocol.messages import Pong, Report
from weightcached.protocol.places import Place
from weightcached.protocol.testing import (
    Close,
    Gate,
    HonestGrant,
    LyingDaemon,
    Receive,
    ReceiveToEnd,
    Send,
    SendRaw,
    Stall,
    frame,
)

Serve = Callable[..., AbstractContextManager[LyingDaemon]]
Attached = Callable[..., WeightSet]


@pytest.fixture
def daemon(settled_model: Path, place: Place) -> Iterator[Daemon]:
    with scripted_daemon(settled_model, place.runtime_dir) as served:
        served.wait_until("ready")
        yield served


def engine(daemon: Daemon, **options: Any) -> WeightSet:
    return attach(daemon.model_dir, mode="require", runtime_dir=daemon.place.runtime_dir, timeout_s=30, **options)


def lease_of(weights: WeightSet) -> Lease:
    assert weights.lease is not None
    return weights.lease


def wait_for_leases(daemon: Daemon, count: int) -> Report:
    """Ask until the daemon lists so many leases: an end is seen by it a moment after it happened here."""
    deadline_s = time.monotonic() + 10
    while (report := daemon.report()).lease_count != count:
        assert time.monotonic() < deadline_s, report.leases
    return report


def test_the_daemon_lists_the_lease_and_close_ends_it(steady_daemon: Daemon) -> None:
    weights = engine(steady_daemon, engine_name="an engine")
    lease = lease_of(weights)
    info = wait_for_leases(steady_daemon, 1).leases[0]
    assert (info.pid, info.name) == (os.getpid(), "an engine")
    assert (lease.state, lease.reason) == ("connected", None)
    assert lease.generation == steady_daemon.report().generation
    weights.close()
    weights.close()
    assert lease.state == "closed"
    assert not lease.wait_lost(0)
    wait_for_leases(steady_daemon, 0)


def test_two_engines_and_one_leaves(steady_daemon: Daemon) -> None:
    one, other = engine(steady_daemon), engine(steady_daemon)
    wait_for_leases(steady_daemon, 2)
    one.close()
    wait_for_leases(steady_daemon, 1)
    assert len(other) == len(list(other.values()))
    assert lease_of(other).state == "connected"
    other.close()


def test_the_daemons_death_is_seen_at_once_and_the_weights_stay(daemon: Daemon) -> None:
    with engine(daemon) as weights:
        lease = lease_of(weights)
        told: queue.Queue[tuple[float, str]] = queue.Queue()
        lease.on_lost(lambda reason: told.put((time.monotonic(), reason)))
        assert not lease.wait_lost(0)
        killed_s = time.monotonic()
        daemon.stop(signal.SIGKILL)
        assert lease.wait_lost(10)
        assert lease.state == "detached"
        assert lease.reason == "the daemon is gone"
        lost_s, reason = told.get(timeout=10)
        late: list[str] = []
        lease.on_lost(late.append)  # too late to wait for: told at once
        assert late == [lease.reason]
        with pytest.raises(DaemonUnreachable, match="detached"):
            lease.ping()
        name = next(iter(weights))
        assert weights[name] is weights[name]
    assert lease_of(weights).state == "closed"
    assert (reason, told.qsize()) == ("the daemon is gone", 0)
    assert lost_s - killed_s < 3, "later than a heartbeat would have found out"


def test_a_daemon_that_stops_in_order_ends_leases_too(daemon: Daemon) -> None:
    with engine(daemon) as weights:
        daemon.stop()
        assert lease_of(weights).wait_lost(10)


def test_a_callback_that_fails_keeps_no_other_from_being_told(daemon: Daemon, log: pytest.LogCaptureFixture) -> None:
    with engine(daemon) as weights:
        told = threading.Event()

        def fail(_: str) -> None:
            raise RuntimeError("a bug in an engine")

        lease_of(weights).on_lost(fail)
        lease_of(weights).on_lost(lambda _: told.set())
        daemon.stop(signal.SIGKILL)
        assert told.wait(10)
    assert any(record.exc_info for record in log.records)


def test_close_from_a_callback(daemon: Daemon) -> None:
    weights = engine(daemon)
    closed = threading.Event()

    def close(_: str) -> None:
        weights.close()
        closed.set()

    lease_of(weights).on_lost(close)
    daemon.stop(signal.SIGKILL)
    assert closed.wait(10)
    weights.close()  # from outside it also waits for the watcher


def test_the_daemon_answers_pings_and_status_on_the_lease(steady_daemon: Daemon) -> None:
    with engine(steady_daemon) as weights:
        lease = lease_of(weights)
        assert 0 <= lease.ping() < 5
        wait_for_leases(steady_daemon, 1)
        report = lease.status()
        assert (report.pid, report.state, report.lease_count) == (steady_daemon.pid, "ready", 1)
        results: list[float] = []
        threads = [threading.Thread(target=lambda: results.append(lease.ping())) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 10


def test_a_stopped_daemon_is_seen_by_a_ping_only(daemon: Daemon) -> None:
    with engine(daemon) as weights:
        lease = lease_of(weights)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            for _ in range(16):
                with pytest.raises(DaemonNotReady, match="does not answer"):
                    lease.ping(timeout_s=0.01)
            with pytest.raises(DaemonNotReady, match="16 earlier"):
                lease.ping(timeout_s=60)  # at once: what is not read is not sent for ever
            assert lease.state == "connected"
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        deadline_s = time.monotonic() + 10
        while True:  # the late answers are of no use to anybody, and are not taken for others
            try:
                assert lease.ping(timeout_s=1) < 1
                break
            except DaemonNotReady:
                assert time.monotonic() < deadline_s


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (frame(Pong(token=1)), "not asked"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not a weightcached frame"),
        (frame(Pong(token=1))[:3], "gone"),
    ],
)
def test_a_lease_on_which_nonsense_comes_is_detached(
    words: bytes, why: str, grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    say = Gate()
    with serve(grant.step(), Stall(say), SendRaw(words), Close()), attached() as weights:
        say.open()
        assert lease_of(weights).wait_lost(10)
        assert why in (lease_of(weights).reason or "")
        weights.verify()


def test_a_pong_for_another_ping(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    with (
        serve(grant.step(), Receive(), Send(Pong(token=99))),
        attached() as weights,
        pytest.raises(DaemonUnreachable, match="a pong for another ping"),
    ):
        lease_of(weights).ping()


def test_closing_does_not_wait_for_half_a_frame(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    sent = Gate()

    class Open:
        def run(self, wire: object) -> None:
            sent.open()

    with serve(grant.step(), SendRaw(frame(Pong(token=1))[:9]), Open()):
        weights = attached()
        sent.wait()
        started_s = time.monotonic()
        weights.close()
        assert time.monotonic() - started_s < 1


def test_a_forked_child_has_the_weights_and_not_the_lease(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    told: list[str] = []
    with serve(grant.step(), Receive(), Send(lambda ping: Pong(token=ping.token))), attached() as weights:  # type: ignore[attr-defined]
        lease = lease_of(weights)
        lease.on_lost(told.append)
        codes = weights["codes"].view(torch.uint8).tolist()

        def work() -> None:
            assert lease.state == "detached"
            assert "forked child" in (lease.reason or "")
            assert not any("socket:" in what and fd > 2 for fd, what in open_fds().items() if fd in ours)
            assert weights["codes"].view(torch.uint8).tolist() == codes
            assert weights["scale"].item() == 1.0  # made here
            weights["codes"].view(torch.uint8).fill_(1)
            lease.wait_lost(0)
            weights.close()

        ours = {lease._channel.connection.fileno()}
        in_child(work)
        assert lease.state == "connected"
        assert weights["codes"].view(torch.uint8).tolist() == codes
        lease.ping()
    assert told == []


def test_a_child_that_outlives_its_parent_does_not_keep_the_lease(steady_daemon: Daemon) -> None:
    """An engine forks a helper after it attached, and dies: the lease must go with the engine."""
    end_r, end_w = os.pipe()
    up_r, up_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        weights = engine(steady_daemon)
        if os.fork() == 0:
            os.close(end_w)
            os.write(up_w, b"up")
            os.read(end_r, 1)  # the helper lives on
            assert weights.lease is not None
            os._exit(0)
        os.read(end_r, 1)
        os._exit(0)
    os.close(up_w)
    os.close(end_r)
    try:
        assert os.read(up_r, 2) == b"up"
        wait_for_leases(steady_daemon, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_for_leases(steady_daemon, 0)
    finally:
        os.close(end_w)  # ends the helper
        assert os.read(up_r, 1) == b""
        os.close(up_r)


def test_a_fork_during_an_attach_leaves_no_connection_in_the_child(place: Place, model: Path) -> None:
    """A thread waits for a daemon that loads, another forks: the child must not hold that connection either."""
    asked = Gate()

    class Open:
        def run(self, wire: object) -> None:
            asked.open()

    with LyingDaemon(place.socket_path, [Receive(), Open(), ReceiveToEnd()]):
        failures: list[BaseException] = []

        def run() -> None:
            try:
                attach(model, mode="require", runtime_dir=place.runtime_dir, timeout_s=1.0)
            except DaemonNotReady as error:
                failures.append(error)

        before = set(open_fds().values())
        thread = threading.Thread(target=run)
        thread.start()
        asked.wait()

        def work() -> None:
            connected = [what for what in open_fds().values() if what.startswith("socket:") and what not in before]
            assert len(connected) <= 1, connected  # the lying daemon's own end, which is in this process too

        in_child(work)
        thread.join()
    assert len(failures) == 1


def test_tensors_keep_the_memory_after_the_daemon_and_the_set_are_gone(
    grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    before = len(memfd_mappings())
    with serve(grant.step()):
        weights = attached()
        norm = weights["model.norm.weight"]
        weights.close()
    del weights
    assert norm.view(torch.uint8).tolist() == list(range(16))
    assert len(memfd_mappings()) == before + 1
