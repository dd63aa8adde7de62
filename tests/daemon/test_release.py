"""`weightcached release`: whoever is there to ask, or nobody; who may; what it says."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemons import TIMEOUT_S, ask, scripted_daemon
from tests.support.manager import Manager
from tests.support.unprivileged import NOBODY, ROOT, command_as
from weightcached.protocol.messages import Refused, Release

COMMAND = [sys.executable, "-P", "-m", "weightcached.daemon", "release"]


def release(runtime_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--runtime-dir", str(runtime_dir), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)


def test_a_daemon_without_a_vault_gives_up_and_ends(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        ended = release(runtime_dir, "--tp-size", "1")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout == "default/host-tp0of1: gave up 1 generation, 4.0 KiB\n"
        assert daemon.process.wait(TIMEOUT_S) == 0
        assert not daemon.place.socket_path.exists()


@pytest.mark.parametrize("kept", ["served", "failed beside it", "after a stop"])
def test_a_vault_that_outlives_daemons_is_emptied(model: Path, runtime_dir: Path, kept: str) -> None:
    with Manager(runtime_dir.parent) as manager:
        daemon = manager.start(model, runtime_dir)
        daemon.wait_until("ready")
        if kept != "served":
            assert daemon.stop() == 0
        if kept == "failed beside it":
            failing = {"fail_at": "job", "fail": {"code": "checkpoint", "message": "no"}}
            daemon = manager.start(model, runtime_dir, "--dtype", "float32", script=failing)
            daemon.wait_until("failed")
        assert any(name.endswith(".m") for name in manager.names)
        ended = release(runtime_dir)
        assert ended.returncode == 0, ended.stderr
        assert not daemon.place.socket_path.exists()
        if kept == "after a stop":  # nobody is there to reach the store
            assert "systemctl clean --what=fdstore" in ended.stdout
            assert any(name.endswith(".m") for name in manager.names)
        else:
            assert "gave up 1 generation," in ended.stdout
            assert daemon.process.wait(TIMEOUT_S) == 0
            daemon.log.join()
            assert manager.names == []


def test_the_socket_file_of_a_killed_daemon_is_removed(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        daemon.stop(signal.SIGKILL)
        assert daemon.place.socket_path.exists()
        refused = release(runtime_dir, "--quarantined")
        assert refused.returncode == 1  # nobody to ask
        assert daemon.place.socket_path.exists()
        ended = release(runtime_dir)
        assert ended.returncode == 0
        assert "removed the socket file" in ended.stdout
        assert not daemon.place.socket_path.exists()
        assert daemon.place.lock_path.exists()


def test_a_daemon_that_does_not_answer_is_no_success(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            ended = release(runtime_dir, "--timeout", "0.5")
            still_there = daemon.place.socket_path.exists()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)  # and may now read what it was asked
        assert ended.returncode == 1
        assert "does not answer" in ended.stderr
        assert still_there


@pytest.mark.root
def test_only_root_and_the_daemon_itself_may(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, "--allow-uid", str(NOBODY)) as daemon:
        daemon.wait_until("ready")
        os.chmod(runtime_dir.parent, 0o755)
        command = command_as(NOBODY, [*COMMAND, "--runtime-dir", str(runtime_dir)])
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert ended.returncode == 1, ended
        assert "may not give up" in ended.stderr
        assert daemon.report().state == "ready"


def test_nothing_there_is_a_success_and_says_so(runtime_dir: Path) -> None:
    ended = release(runtime_dir)
    assert (ended.returncode, ended.stdout) == (0, f"nothing is cached in {runtime_dir}\n")
    ended = release(runtime_dir, "--tp-size", "1")
    assert (ended.returncode, ended.stdout) == (0, "default/host-tp0of1: nothing is cached there\n")
    assert release(runtime_dir, "--tp-rank", "1").returncode == 64
    assert release(runtime_dir, "--name", "../x", "--tp-size", "1").returncode == 64


def test_a_release_is_answered_before_it_is_done(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, script={"hang_at": "progress"}) as daemon:
        channel = daemon.connect()
        try:
            answer = ask(channel, Release())
        finally:
            channel.close()
        assert not isinstance(answer, Refused)
        assert answer.model_dump() == {"generations": 0, "resident_nbytes": 0}
        assert daemon.process.wait(TIMEOUT_S) == 0
