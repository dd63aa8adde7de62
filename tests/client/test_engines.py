"""Engines as processes and threads: killed at every point of an attach, many at once, a fresh process without torch.

The daemons are real; a scripted worker stands in for the loader, because what is loaded does not matter here.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weightcached.client.attach  # `weightcached.client.attach` as an attribute is the function
import weightcached.client.connect
from tests.support.daemons import Daemon, scripted_daemon
from tests.support.resources import open_fds
from tests.support.unprivileged import ROOT
from weightcached.client import WeightSet, attach
from weightcached.client.lease import Lease
from weightcached.protocol.channel import Channel
from weightcached.protocol.errors import DaemonFailed, DaemonNotReady, DaemonUnreachable
from weightcached.protocol.messages import Loading
from weightcached.protocol.places import Place

ATTACH = sys.modules["weightcached.client.attach"]


def engine(daemon: Daemon, **options: Any) -> WeightSet:
    asked = {"mode": "require", "runtime_dir": daemon.place.runtime_dir, "timeout_s": 30.0, **options}
    return attach(daemon.model_dir, **asked)


def settled(daemon: Daemon) -> tuple[int, int]:
    """Leases and open descriptors of the daemon, once the connection that asks is the only one."""
    deadline_s = time.monotonic() + 10
    while (report := daemon.report()).lease_count:
        assert time.monotonic() < deadline_s, report.leases
    fds = [what for what in open_fds(daemon.pid).values() if not what.startswith("socket:")]
    return report.lease_count, len(fds)


def _stop_here(up: int) -> None:
    os.write(up, b"!")
    signal.pause()


def _before(owner: Any, name: str, up: int) -> None:
    def stopped(*args: object, **options: object) -> None:
        _stop_here(up)

    setattr(owner, name, stopped)


def _after(owner: Any, name: str, up: int) -> None:
    real = getattr(owner, name)

    def stopped(*args: object, **options: object) -> object:
        result = real(*args, **options)
        _stop_here(up)
        return result

    setattr(owner, name, stopped)


POINTS: dict[str, Callable[[int], None]] = {
    "connected": lambda up: _before(weightcached.client.connect, "_check_trust", up),
    "trusted": lambda up: _after(ATTACH, "reach", up),
    "asked": lambda up: _before(Channel, "receive", up),
    "granted, nothing mapped": lambda up: _before(ATTACH, "import_grant", up),
    "mapped": lambda up: _after(ATTACH, "import_grant", up),
    "leased": lambda up: _after(Lease, "__init__", up),
    "attached": lambda up: _after(ATTACH, "_from_daemon", up),
}


@pytest.mark.parametrize("point", POINTS)
def test_an_engine_killed_at_any_point_leaves_nothing_at_the_daemon(point: str, steady_daemon: Daemon) -> None:
    before = settled(steady_daemon)
    up_r, up_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            POINTS[point](up_w)
            engine(steady_daemon)
        finally:
            os._exit(1)  # not reached: it is killed where it stops
    os.close(up_w)
    try:
        assert os.read(up_r, 1) == b"!"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(up_r)
    assert settled(steady_daemon) == before
    with engine(steady_daemon) as weights:
        assert len(weights) == 1


def test_ten_threads_that_attach_at_once(steady_daemon: Daemon) -> None:
    barrier, sets = threading.Barrier(10), []

    def run() -> None:
        barrier.wait()
        sets.append(engine(steady_daemon))

    threads = [threading.Thread(target=run) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sets) == 10
    assert len({weights.generation for weights in sets}) == 1
    assert steady_daemon.report().lease_count == 10
    for weights in sets:
        weights.close()
    assert settled(steady_daemon)[0] == 0


def test_an_engine_that_starts_before_the_weights_are_there_waits_and_sees_the_progress(
    settled_model: Path, place: Place, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = {"hang_at": "progress", "release": str(gate)}
    with scripted_daemon(settled_model, place.runtime_dir, script=script) as daemon:
        daemon.wait_logged("listening")
        seen: list[Loading] = []
        reading = threading.Event()

        def progress(loading: Loading) -> None:
            seen.append(loading)
            if loading.stage == "read":
                reading.set()

        def release() -> None:
            assert reading.wait(30)
            with open(gate, "wb"):
                pass

        thread = threading.Thread(target=release)
        thread.start()
        with engine(daemon, progress=progress) as weights:
            assert weights.source == "daemon"
        thread.join()
    assert seen


def test_a_load_that_does_not_end_in_time(settled_model: Path, place: Place) -> None:
    with scripted_daemon(settled_model, place.runtime_dir, script={"hang_at": "job"}) as daemon:
        daemon.wait_logged("listening")
        with pytest.raises(DaemonNotReady):
            engine(daemon, timeout_s=0.3)
        daemon.stop(signal.SIGKILL)


def test_a_load_that_failed(settled_model: Path, place: Place) -> None:
    fail = {"code": "truncated_file", "message": "model.safetensors is cut short", "transient": False}
    with scripted_daemon(settled_model, place.runtime_dir, script={"fail_at": "job", "fail": fail}) as daemon:
        daemon.wait_until("failed")
        with pytest.raises(DaemonFailed, match=r"model\.safetensors is cut short"):
            engine(daemon)
        with pytest.raises(DaemonFailed):  # no fallback either
            engine(daemon, mode="client")


def test_a_daemon_killed_while_it_loads(settled_model: Path, place: Place) -> None:
    with scripted_daemon(settled_model, place.runtime_dir, script={"hang_at": "job"}) as daemon:
        daemon.wait_logged("listening")
        waiting = threading.Event()
        failures: list[DaemonUnreachable] = []

        def run() -> None:
            try:
                engine(daemon, mode="client", timeout_s=1, progress=lambda _: waiting.set())
            except DaemonUnreachable as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert waiting.wait(30)
        daemon.stop(signal.SIGKILL)
        thread.join()
    assert "died during the exchange" in str(failures[0])


def test_an_attach_goes_on_with_the_daemon_that_takes_over(settled_model: Path, place: Place) -> None:
    waiting, results = threading.Event(), []
    with scripted_daemon(settled_model, place.runtime_dir, script={"hang_at": "job"}) as first:
        first.wait_logged("listening")

        def run() -> None:
            with engine(first, timeout_s=60, progress=lambda _: waiting.set()) as weights:
                results.append(weights.generation)

        thread = threading.Thread(target=run)
        thread.start()
        assert waiting.wait(30)
        first.stop(signal.SIGKILL)
    with scripted_daemon(settled_model, place.runtime_dir) as second:
        thread.join()
        assert results == [second.report().generation]


FRESH = """
import sys
from weightcached.client import attach, bind, meta_parameters
weights = attach(sys.argv[1], mode="require", runtime_dir=sys.argv[2], timeout_s=30)
heavy = {"torch", "numpy", "weightcached.loader", "huggingface_hub", "prometheus_client", "safetensors"}
print(sorted(heavy & sys.modules.keys()))
next(iter(weights.values()))
print("torch" in sys.modules)
"""


def test_a_fresh_process_has_no_torch_until_a_tensor_is_asked_for_and_needs_no_clean_up(steady_daemon: Daemon) -> None:
    """It ends without closing: the kernel gives the lease back, and nothing hangs or complains."""
    place = steady_daemon.place
    command = [sys.executable, "-W", "error", "-c", FRESH, str(steady_daemon.model_dir), str(place.runtime_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("[]\nTrue\n", "", 0)
    assert settled(steady_daemon)[0] == 0
