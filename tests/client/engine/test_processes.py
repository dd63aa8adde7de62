"""Engines as processes: killed, restarted, without a daemon, with one of their own. Few, because each costs seconds."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import expert_models
from tests.support.daemons import daemon, supervised_daemon
from weightcached.client import STALE_EXIT
from weightcached.client.demo import http as engine_http
from weightcached.client.demo.checkpoint import write_tokenizer
from weightcached.client.engine.options import EngineOptions, serve_command
from weightcached.client.owned_daemon import OwnedDaemon
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import DeploymentError
from weightcached.protocol.places import Place, host_device

PROMPT = "What memcached is to objects,"
TOKENS = 24
TIMEOUT_S = 90.0


class Engine:
    """A running `weightcached engine`, standard error in a file."""

    def __init__(self, model: Path, runtime_dir: Path, *words: str, mode: str, log: Path) -> None:
        command = [sys.executable, "-m", "weightcached.daemon", "engine", "--model", str(model)]
        command += ["--weight-cache-mode", mode, "--runtime-dir", str(runtime_dir), *words]
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, "WEIGHTCACHED_CACHE_DIR": str(runtime_dir / "digests")},
            )
        self.ready: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def wait_ready(self) -> dict[str, Any]:
        """Its line of JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.ready = json.loads(line)
        return self.ready

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return engine_http.request(self.url, "GET" if body is None else "POST", path, body)

    def generate(self, max_new_tokens: int = TOKENS) -> list[int]:
        ids: list[int] = self.ask("/generate", {"prompt": PROMPT, "max_new_tokens": max_new_tokens})["token_ids"]
        return ids

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)


@contextmanager
def engine(model: Path, runtime_dir: Path, *words: str, mode: str) -> Iterator[Engine]:
    """An engine that is killed at the end if it still runs."""
    started = Engine(model, runtime_dir, "--json", *words, mode=mode, log=runtime_dir / f"engine-{time.time_ns()}.log")
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait(TIMEOUT_S)
        if started.process.stdout is not None:
            started.process.stdout.close()


def run(model: Path, runtime_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`weightcached engine` to its end."""
    command = [sys.executable, "-m", "weightcached.daemon", "engine", "--model", str(model)]
    return subprocess.run(
        [*command, "--runtime-dir", str(runtime_dir), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def wait_gone(pid: int) -> None:
    """Blocks until no process has the pid of a process that is not our child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([pidfd], [], [], TIMEOUT_S)
        assert ended, f"process {pid} still runs"
    finally:
        os.close(pidfd)


@pytest.mark.slow
def test_the_same_tokens_across_a_killed_engine_and_a_killed_daemon(tiny: Path, runtime_dir: Path) -> None:
    """One story, because every start of an engine costs seconds: disk, daemon, kill, daemon again, kill the daemon."""
    with engine(tiny, runtime_dir, "--port", "0", mode="off") as plain:
        plain.wait_ready()
        wanted = plain.generate()
        assert plain.end(signal.SIGTERM) == 0
    with daemon(tiny, runtime_dir) as served:
        served.wait_until("ready")
        with engine(tiny, runtime_dir, "--port", "0", mode="client") as first:
            assert first.wait_ready()["weights"]["source"] == "daemon"
            assert first.generate() == wanted
            assert served.report().lease_count == 1
            assert first.end(signal.SIGKILL) == -signal.SIGKILL
        words = ["--port", "0", "--prompt", PROMPT, "--max-new-tokens", str(TOKENS)]
        with engine(tiny, runtime_dir, *words, mode="require") as second:
            ready = second.wait_ready()
            assert ready["answer"]["token_ids"] == wanted
            lease = second.ask("/status")["weights"]["lease"]
            assert lease == {"state": "connected", "reason": None, "obstacle": None, "losses": 0, "resumes": 0}
            long = second.generate(200)
            assert _generate_while(second, 200, lambda: served.stop(signal.SIGKILL)) == long
            lease = wait_lease(second, "detached")
            assert lease["reason"]
            assert second.generate() == wanted
            assert second.end(signal.SIGTERM) == 0
            log = second.log.read_text()
            assert "lost the lease" in log
            assert "Traceback" not in log


def _generate_while(served: Engine, max_new_tokens: int, act: Any) -> list[int]:
    """The answer to a request in the middle of which ``act`` is called."""
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(served.generate(max_new_tokens)))
    asking.start()
    while served.ask("/status")["requests"]["in_flight"] == 0:
        assert asking.is_alive(), "the answer was there before anything could happen"
    act()
    in_flight = served.ask("/status")["requests"]["in_flight"]
    asking.join(TIMEOUT_S)
    assert in_flight == 1, "the answer was there before anything had happened"
    return answers[0]


def wait_lease(served: Engine, state: str, *, resumes: int = 0) -> dict[str, Any]:
    deadline = Deadline.after(30)
    while (lease := served.ask("/status")["weights"]["lease"])["state"] != state or lease["resumes"] != resumes:
        assert not deadline.passed, lease
    found: dict[str, Any] = lease
    return found


@pytest.mark.slow
def test_an_engine_does_not_notice_that_its_keeper_is_killed_and_ends_when_there_are_other_weights(
    tiny: Path, runtime_dir: Path
) -> None:
    """Under a supervisor the next keeper adopts: same tokens, the lease resumed. When all is stopped and started anew
    the weights are others, and this engine was told to end then.
    """
    words = ["--port", "0", "--on-stale", "exit"]
    with supervised_daemon(tiny, runtime_dir) as supervisor:
        supervisor.wait_until("ready")
        with engine(tiny, runtime_dir, *words, mode="require") as served:
            assert served.wait_ready()["weights"]["source"] == "daemon"
            long = served.generate(200)
            keeper = supervisor.report().pid
            assert _generate_while(served, 200, lambda: os.kill(keeper, signal.SIGKILL)) == long
            lease = wait_lease(served, "connected", resumes=1)
            assert (lease["reason"], lease["losses"]) == (None, 1)
            assert supervisor.stop() == 0
            assert "draining" in wait_lease(served, "detached", resumes=1)["reason"]
            assert served.generate(200) == long
            with daemon(tiny, runtime_dir):
                assert served.process.wait(TIMEOUT_S) == STALE_EXIT
            log = served.log.read_text()
            assert f"ends with status {STALE_EXIT}" in log
            assert "Traceback" not in log


def test_require_without_a_daemon_fails_before_it_imports_anything(tiny: Path, runtime_dir: Path) -> None:
    done = run(tiny, runtime_dir, "--weight-cache-mode", "require", "--prompt", PROMPT)
    assert done.returncode == 3
    assert "daemon_absent" in done.stderr
    assert done.stdout == ""


def test_another_dtype_than_the_daemons_is_a_configuration_error(tiny: Path, runtime_dir: Path) -> None:
    with daemon(tiny, runtime_dir) as served:
        served.wait_until("ready")
        done = run(tiny, runtime_dir, "--weight-cache-mode", "client", "--dtype", "float16", "--prompt", PROMPT)
    assert done.returncode == 2
    assert "dtype" in done.stderr
    assert "float16" in done.stderr


def test_a_model_that_is_not_there_is_a_bad_option(runtime_dir: Path) -> None:
    done = run(runtime_dir / "nothing", runtime_dir, "--prompt", PROMPT)
    assert done.returncode == 64
    assert "nothing there" in done.stderr


def test_an_engine_that_waits_for_weights_ends_at_once_when_it_is_told_to(tiny: Path, runtime_dir: Path) -> None:
    """A place with a listener that never answers, as a stopped daemon is."""
    place = Place(runtime_dir, "default", host_device(tp_size=1, tp_rank=0))
    place.directory.mkdir(mode=0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place.socket_path))
        listener.listen()
        with engine(tiny, runtime_dir, "--prompt", PROMPT, mode="require") as waiting:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(1) != b""
                assert waiting.end(signal.SIGTERM) == 128 + signal.SIGTERM


def test_an_engine_whose_time_is_over_says_not_ready(tiny: Path, runtime_dir: Path) -> None:
    place = Place(runtime_dir, "default", host_device(tp_size=1, tp_rank=0))
    place.directory.mkdir(mode=0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place.socket_path))
        listener.listen()
        done = run(tiny, runtime_dir, "--prompt", PROMPT, "--weight-cache-mode", "require", "--timeout", "0.5")
    assert done.returncode == 4
    assert "daemon_not_ready" in done.stderr


@pytest.mark.slow
def test_an_engine_with_its_own_daemon_and_the_daemon_ends_with_it(tiny: Path, runtime_dir: Path) -> None:
    place = Place(runtime_dir, "default", host_device(tp_size=1, tp_rank=0))
    with engine(tiny, runtime_dir, "--port", "0", "--prompt", PROMPT, mode="daemon") as owner:
        ready = owner.wait_ready()
        assert ready["weights"]["source"] == "daemon"
        assert ready["answer"]["token_ids"]
        assert ready["seconds"]["daemon start"] > 0
        daemon_pid = _daemon_pid(place)
        assert _parent_of(daemon_pid) == owner.process.pid
        assert owner.end(signal.SIGKILL) == -signal.SIGKILL
        wait_gone(daemon_pid)
    # What a killed daemon leaves behind does not stop the next one, and an orderly end leaves nothing.
    options = EngineOptions(model=str(tiny), mode="daemon", runtime_dir=str(runtime_dir))
    with OwnedDaemon(place, serve_command(options, tiny)) as owned:
        owned.wait_bound(Deadline.after(TIMEOUT_S))
        assert _daemon_pid(place) == owned.pid
    assert not place.socket_path.exists()


def _daemon_pid(place: Place) -> int:
    command = [sys.executable, "-m", "weightcached.daemon", "status", "--runtime-dir", str(place.runtime_dir), "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    pid: int = json.loads(said.stdout)["daemons"][0]["pid"]
    return pid


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_place_that_is_taken_ends_the_engine_and_not_the_other_daemon(tiny: Path, runtime_dir: Path) -> None:
    with daemon(tiny, runtime_dir) as other:
        other.wait_until("ready")
        done = run(tiny, runtime_dir, "--weight-cache-mode", "daemon", "--prompt", PROMPT)
        assert done.returncode == 3
        assert "use mode client" in done.stderr
        assert other.report().state == "ready"


def test_an_owned_daemon_that_cannot_start_is_said_with_its_exit_status(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = EngineOptions(model=str(tiny), mode="daemon", runtime_dir=str(tmp_path / "file"))
    place = Place(tmp_path / "file", "default", host_device(tp_size=1, tp_rank=0))
    with OwnedDaemon(place, serve_command(options, tiny)) as owned, pytest.raises(DeploymentError) as caught:
        owned.wait_bound(Deadline.after(TIMEOUT_S))
    assert "exit status" in str(caught.value.found)


@pytest.mark.slow
def test_a_model_with_experts_from_the_layout_that_transformers_makes(tmp_path: Path, runtime_dir: Path) -> None:
    settings = {"vocab_size": write_tokenizer(tmp_path), "eos_token_id": 0, "max_position_embeddings": 256}
    model = expert_models.write(tmp_path, expert_models.config_of("mixtral", **settings))
    words = ("--prompt", PROMPT, "--max-new-tokens", "8", "--json")
    plain = json.loads(run(model, runtime_dir, *words, "--weight-cache-mode", "off").stdout)
    made = run(model, runtime_dir, *words, "--weight-cache-mode", "daemon", "--layout", "transformers")
    assert made.returncode == 0, made.stderr
    cached = json.loads(made.stdout)
    assert cached["weights"]["source"] == "daemon"
    assert cached["answer"]["token_ids"] == plain["answer"]["token_ids"]
    refused = run(model, runtime_dir, *words, "--weight-cache-mode", "daemon")
    assert refused.returncode == 2, refused.stderr
    assert "--layout transformers" in refused.stderr
