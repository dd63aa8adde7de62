"""The exporter: one address for all daemons of a runtime directory, those that do not answer included."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from tests.support.daemons import SCRIPTED, TIMEOUT_S, Log, scripted_daemon, scripted_environment, start
from tests.support.reports import value
from tests.support.scraping import Site
from tests.support.unprivileged import ROOT
from weightcached.protocol.processes import python_command

ALIVE, DEAD, STOPPED = (f"{name}/host-tp0of1" for name in ("alive", "dead", "stopped"))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "weightcached.daemon", *map(str, arguments)]


@contextmanager
def exporter(runtime_dir: Path, *more: object) -> Iterator[Site]:
    """A running `weightcached exporter`, which has to stop well."""
    arguments = ("exporter", "--listen", "127.0.0.1:0", "--runtime-dir", runtime_dir, "--log-format", "json", *more)
    process = subprocess.Popen(command(*arguments), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    log = Log(process.stderr)
    try:
        yield Site(json.loads(log.wait_for(lambda line: '"listening"' in line))["address"])
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(TIMEOUT_S)
        log.join()
    assert status == 0, log.lines


def test_a_directory_without_daemons(runtime_dir: Path) -> None:
    with exporter(runtime_dir) as site:
        assert (site.ask("/healthz").status, site.ask("/readyz").status) == (200, 503)
        assert site.status() == []
        found = site.metrics()
        assert not [name for name, labels in found if labels]
        assert (value(found, "host_unexplained_bytes") or 0) >= 0


def test_all_daemons_of_a_host_the_dead_and_the_hung_included(model: Path, runtime_dir: Path) -> None:
    with ExitStack() as daemons, exporter(runtime_dir, "--timeout", "0.5") as site:
        alive, dead, stopped = (
            daemons.enter_context(scripted_daemon(model, runtime_dir, name=place.partition("/")[0]))
            for place in (ALIVE, DEAD, STOPPED)
        )
        for daemon in (alive, dead, stopped):
            daemon.wait_until("ready")
        assert site.ask("/readyz").status == 200
        lease = daemons.enter_context(closing(alive.connect()))
        _, fds = alive.attach(lease)
        fds.close()
        dead.stop(signal.SIGKILL)
        stopped.process.send_signal(signal.SIGSTOP)
        daemons.callback(stopped.process.send_signal, signal.SIGCONT)

        found = site.metrics()
        assert {place: value(found, "up", place=place) for place in (ALIVE, DEAD, STOPPED)} == {
            ALIVE: 1,
            DEAD: 0,
            STOPPED: 0,
        }
        assert value(found, "problem", place=DEAD, code="daemon_unreachable") == 1
        assert value(found, "problem", place=STOPPED, code="daemon_not_ready") == 1
        assert value(found, "leases", place=ALIVE, state="connected") == 1
        assert value(found, "resident_bytes", place=ALIVE) == 4096
        assert value(found, "host_hidden_processes") is not None

        readiness = site.ask("/readyz")
        assert readiness.status == 503
        assert len(readiness.text.splitlines()) == 3
        assert [(one["place"], one["reachable"]) for one in site.status()] == [
            (ALIVE, True),
            (DEAD, False),
            (STOPPED, False),
        ]

        began_s = time.monotonic()
        answers: list[int] = []
        askers = [threading.Thread(target=lambda: answers.append(site.ask("/readyz").status)) for _ in range(16)]
        for thread in askers:
            thread.start()
        for thread in askers:
            thread.join()
        assert answers == [503] * 16
        assert time.monotonic() - began_s < 8  # not sixteen times what the hung one costs


def test_a_keeper_that_was_killed_and_came_back(model: Path, runtime_dir: Path) -> None:
    """Restarts and adoptions are counted where they outlive the keeper: in the vault."""
    supervise = python_command("weightcached.daemon", "supervise", "--log-format", "json", "--")
    daemon = start(
        model, runtime_dir, command=(*supervise, *SCRIPTED), environment=scripted_environment(runtime_dir, None)
    )
    try:
        first = daemon.wait_until("ready")
        os.kill(first.pid, signal.SIGKILL)
        daemon.log.wait_for(lambda line: '"published"' in line and '"adopt"' in line)
        again = daemon.report()
        with exporter(runtime_dir) as site:
            found = site.metrics()
        assert again.generation == first.generation
        assert value(found, "restarts_total") == 1
        assert value(found, "adoptions_total") == 1
        assert value(found, "adoption_attempts") == 0
        assert 0 < (value(found, "adoption_seconds") or 0) < 30
        assert value(found, "vault", state="kept") == 1
        assert value(found, "load_seconds_count") == 0  # this keeper has loaded nothing
        assert value(found, "load_read_bytes") == 0
    finally:
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["--listen", "0.0.0.0:0"], 64, "--allow-remote"),
        (["--listen", "nonsense"], 64, "--listen"),
        (["--runtime-dir", "relative"], 64, "absolute"),
    ],
)
def test_options_that_cannot_be_used(arguments: list[str], status: int, word: str) -> None:
    result = subprocess.run(command("exporter", *arguments), capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (result.returncode, word in result.stderr) == (status, True), result.stderr


def test_an_address_that_is_taken(runtime_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ("exporter", "--listen", listen, "--runtime-dir", runtime_dir)
        result = subprocess.run(command(*arguments), capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (result.returncode, listen in result.stderr) == (1, True), result.stderr


def test_up_needs_a_port_for_each_rank() -> None:
    arguments = ("up", "--model", "/nowhere", "--tp-size", 2, "--metrics-address", "127.0.0.1:65535")
    result = subprocess.run(command(*arguments), capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (result.returncode, "not every rank has a port" in result.stderr) == (64, True), result.stderr
