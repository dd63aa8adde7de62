"""Keepers that die and come back while engines hold, and ask for, their weights. Everything here is real.

With a vault (a service manager with a store: `tests/support/manager.py`, or `weightcached supervise`) the weights come
back with the keeper, and engines are none the wiser; without one they do not, and engines are told.
"""

import os
import queue
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import Daemon, scripted_daemon, supervised_daemon
from tests.support.manager import Manager
from weightcached.client import WeightSet, attach
from weightcached.client.counters import fallbacks
from weightcached.client.lease import Lease
from weightcached.protocol.messages import Report
from weightcached.protocol.places import Place

KILLS = 20


def engine(model: Path, place: Place, **options: Any) -> WeightSet:
    """In mode ``client``, where a daemon that seemed absent would be a fallback that shows in ``source``."""
    return attach(model, mode="client", runtime_dir=place.runtime_dir, timeout_s=60, **options)


def lease_of(weights: WeightSet) -> Lease:
    assert weights.source == "daemon"
    assert weights.lease is not None
    return weights.lease


def test_without_a_vault_the_next_keeper_has_other_weights_and_the_engine_is_told(
    settled_model: Path, place: Place
) -> None:
    told: queue.Queue[tuple[str, Report | None]] = queue.Queue()
    with scripted_daemon(settled_model, place.runtime_dir) as first:
        first.wait_until("ready")
        weights = engine(settled_model, place, on_stale=lambda *words: told.put(words))
        lease = lease_of(weights)
        first.stop(signal.SIGKILL)
        assert lease.wait_lost(20)
    assert lease.state == "detached"
    with weights, scripted_daemon(settled_model, place.runtime_dir) as second:
        reason, report = told.get(timeout=60)
        assert weights.generation in reason
        assert report is not None
        assert (report.pid, lease.state) == (second.pid, "stale")
        weights.verify()
        assert second.wait_until("ready").generation != weights.generation
        with engine(settled_model, place) as again:
            assert again.generation != weights.generation


@contextmanager
def kept(model: Path, place: Place) -> Iterator[Callable[[], Daemon]]:
    """``next_life()`` kills the keeper, if there is one, and starts the next, which is handed what is in the vault."""
    lives: list[Daemon] = []
    with Manager(place.runtime_dir) as manager:

        def next_life() -> Daemon:
            if lives:
                lives[-1].stop(signal.SIGKILL)
            lives.append(manager.start(model, place.runtime_dir))
            return lives[-1]

        try:
            yield next_life
        finally:
            for life in lives:
                life.stop(signal.SIGKILL)


def test_with_a_vault_the_lease_comes_back_with_the_next_keeper(settled_model: Path, place: Place) -> None:
    resumed: queue.Queue[float] = queue.Queue()
    with kept(settled_model, place) as next_life:
        next_life().wait_until("ready")
        with engine(settled_model, place, engine_name="held") as weights:
            lease = lease_of(weights)
            lease.on_resumed(resumed.put)
            nonces = {lease.nonce}
            for number in (1, 2):
                keeper = next_life()
                resumed.get(timeout=60)
                nonces.add(lease.nonce)
                assert (lease.state, lease.losses, lease.resumes) == ("connected", number, number)
                report = lease.status()
                assert (report.pid, report.generation) == (keeper.pid, weights.generation)
                assert [(info.name, info.pid) for info in report.leases] == [("held", os.getpid())]
                assert report.attaches["resumed"] == 1
            assert len(nonces) == 3
            weights.verify()


def test_an_attach_that_waits_in_a_dead_keepers_backlog_gets_its_weights(settled_model: Path, place: Place) -> None:
    with kept(settled_model, place) as next_life:
        first = next_life()
        first.wait_until("ready")
        with engine(settled_model, place) as before:
            generation = before.generation
        first.stop(signal.SIGKILL)
        waiting, got = threading.Event(), queue.Queue[WeightSet]()

        def run() -> None:
            waiting.set()
            got.put(engine(settled_model, place))

        thread = threading.Thread(target=run)
        thread.start()
        waiting.wait()
        next_life()
        with got.get(timeout=60) as weights:
            assert (weights.source, weights.generation) == ("daemon", generation)
            weights.verify()
        thread.join()


def test_an_attach_whose_keeper_is_killed_under_it_goes_on_with_the_next(settled_model: Path, place: Place) -> None:
    """It was connected, and had not been answered: the keeper was stopped, and then killed."""
    with kept(settled_model, place) as next_life:
        first = next_life()
        first.wait_until("ready")
        os.kill(first.pid, signal.SIGSTOP)
        got: queue.Queue[WeightSet] = queue.Queue()
        thread = threading.Thread(target=lambda: got.put(engine(settled_model, place)))
        thread.start()
        wait_for_connection_to(first)
        next_life()
        with got.get(timeout=60) as weights:
            assert weights.source == "daemon"
            weights.verify()
        thread.join()


def wait_for_connection_to(stopped: Daemon) -> None:
    """Until somebody is connected to a daemon that cannot accept: the kernel lists both ends by the socket's path."""
    path = str(stopped.place.socket_path)
    deadline_s = time.monotonic() + 20
    while Path("/proc/net/unix").read_text().count(path) < 2:
        assert time.monotonic() < deadline_s, "nobody has connected"


def test_a_death_is_noticed_in_milliseconds(settled_model: Path, place: Place, record_property: Any) -> None:
    """The median of five is held against a bound that a busy machine keeps too; the figure is in the report."""
    lost_s: queue.Queue[float] = queue.Queue()
    resumed: queue.Queue[float] = queue.Queue()
    delays_s = []
    with kept(settled_model, place) as next_life:
        keeper = next_life()
        keeper.wait_until("ready")
        with engine(settled_model, place) as weights:
            lease_of(weights).on_lost(lambda _: lost_s.put(time.monotonic()))
            lease_of(weights).on_resumed(resumed.put)
            for _ in range(5):
                killed_s = time.monotonic()
                os.kill(keeper.pid, signal.SIGKILL)
                delays_s.append(lost_s.get(timeout=20) - killed_s)
                keeper = next_life()
                resumed.get(timeout=60)
    median_s = statistics.median(delays_s)
    record_property("death_noticed_ms", [round(1000 * delay_s, 2) for delay_s in delays_s])
    assert median_s < 0.1, delays_s


class Attaching:
    """An engine that restarts all the time, in a thread: attaches, compares every byte with its digest, lets go."""

    def __init__(self, model: Path, place: Place) -> None:
        self.generations: set[str] = set()
        self.count = 0
        self.slowest_s = 0.0
        self.failures: list[BaseException] = []
        self._model, self._place = model, place
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._enough.is_set():
                begun_s = time.monotonic()
                with engine(self._model, self._place) as weights:
                    self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
                    lease_of(weights)
                    weights.verify()
                    self.generations.add(weights.generation)
                    self.count += 1
        except BaseException as error:  # noqa: BLE001  # shown in the test's own thread
            self.failures.append(error)

    def __enter__(self) -> "Attaching":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()


@pytest.mark.slow
def test_twenty_kills_under_supervise_and_no_engine_sees_an_error(settled_model: Path, place: Place) -> None:
    """The real loader, the real supervisor. One engine holds a lease all the while, another attaches all the while."""
    resumed: queue.Queue[float] = queue.Queue()
    before = fallbacks()
    with supervised_daemon(settled_model, place.runtime_dir) as supervisor:
        supervisor.wait_until("ready")
        with engine(settled_model, place) as held, Attaching(settled_model, place) as attaching:
            lease = lease_of(held)
            lease.on_resumed(resumed.put)
            for number in range(1, KILLS + 1):
                os.kill(lease.status(timeout_s=30).pid, signal.SIGKILL)
                resumed.get(timeout=60)
                assert not attaching.failures, attaching.failures
                assert (lease.state, lease.losses, lease.resumes) == ("connected", number, number)
            held.verify()
            report = lease.status(timeout_s=30)
        assert not attaching.failures, attaching.failures
        assert attaching.generations == {held.generation}
        assert attaching.count > KILLS
        assert (report.generation, report.starts) == (held.generation, KILLS + 1)
        assert fallbacks() == before  # of all tests of this process
        refusals = set(report.attaches) - {"granted", "resumed", "unproven"}
        assert not any(report.attaches[code] for code in refusals)
