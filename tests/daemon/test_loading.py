"""The worker's supervision: killed, out of memory, raising, lying and lingering workers of a real daemon.

Nothing half-filled is published, nothing is left behind, the reason reaches whoever asks, and the daemon lives on.
"""

import os
import select
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.cgroups import memory_limit
from tests.support.daemons import Daemon, converse, scripted_daemon
from tests.support.resources import open_fds
from weightcached.protocol.messages import Refused

POINTS = ("start", "planned", "progress")


def memory_of(daemon: Daemon) -> list[str]:
    """The segments and manifests that the daemon holds."""
    return [what for what in open_fds(daemon.pid).values() if "memfd" in what and "weightcached:state" not in what]


def failed(daemon: Daemon) -> Refused:
    """Wait for the failure; nothing of the attempt is left; what a client is told about it."""
    report = daemon.wait_until("failed")
    assert report.state == "failed"
    assert report.generation is None
    assert report.resident_nbytes == 0
    assert memory_of(daemon) == [], "memory of a failed load is held"
    assert children_of(daemon.pid) == []
    channel = daemon.connect()
    try:
        refused = converse(channel, daemon.hello()).message
    finally:
        channel.close()
    assert isinstance(refused, Refused)
    assert refused.code == "daemon_failed"
    assert report.last_error is not None
    assert refused.found == report.last_error
    assert daemon.process.poll() is None
    return refused


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def attempts_of(daemon: Daemon) -> int:
    return sum(record["message"] == "progress" and record["stage"] == "start worker" for record in daemon.log.records())


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_killed_once_is_started_again(model: Path, runtime_dir: Path, point: str) -> None:
    script = {"kill_at": point, "only_attempts": 1, "attempts": str(runtime_dir.parent / "attempts")}
    with scripted_daemon(model, runtime_dir, script=script) as daemon:
        report = daemon.wait_until("ready")
        assert attempts_of(daemon) == 2
        assert "SIGKILL" in str(report.last_error)
        assert len(memory_of(daemon)) == 2
        _, fds = daemon.attach()
        fds.close()


def test_a_worker_that_is_killed_every_time_is_a_failure_in_the_end(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, script={"kill_at": "progress"}) as daemon:
        refused = failed(daemon)
        assert attempts_of(daemon) == 4
        assert str(refused.found).startswith("worker_died:")


def test_a_worker_that_ends_as_if_all_were_well_is_not_tried_again(model: Path, runtime_dir: Path) -> None:
    """An engine's adapter that ends the process does so every time."""
    with scripted_daemon(model, runtime_dir, script={"exit_at": "planned"}) as daemon:
        refused = failed(daemon)
        assert attempts_of(daemon) == 1
        assert str(refused.found).startswith("worker_died:")
        assert "exit status 0" in str(refused.found)


def test_a_worker_that_raises_leaves_its_last_words(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, script={"raise_at": "memory"}) as daemon:
        refused = failed(daemon)
        assert "RuntimeError: as the script says, at memory" in str(refused.found)
        daemon.wait_logged("child says", text="RuntimeError: as the script says, at memory")


FAULT = {
    "code": "truncated_file",
    "message": "the file is shorter than its header says",
    "where": "model.safetensors",
    "next_step": "download it again",
}


def test_a_permanent_cause_is_not_tried_again(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, script={"fail_at": "job", "fail": FAULT}) as daemon:
        refused = failed(daemon)
        assert attempts_of(daemon) == 1
        assert "truncated_file" in str(refused.found)
        assert "model.safetensors" in str(refused.found)
        assert refused.next_step == "download it again"


def test_a_cause_that_the_worker_calls_transient_is_tried_again(model: Path, runtime_dir: Path) -> None:
    script = {"fail_at": "job", "fail": {**FAULT, "transient": True}, "only_attempts": 2}
    script["attempts"] = str(runtime_dir.parent / "attempts")
    with scripted_daemon(model, runtime_dir, script=script) as daemon:
        daemon.wait_until("ready")
        assert attempts_of(daemon) == 3


@pytest.mark.parametrize(
    ("manifest", "words"),
    [("unsealed", "lacks seals"), ("short", "another size"), ("missing", "lacks the manifest")],
)
def test_a_manifest_that_is_not_what_was_announced(model: Path, runtime_dir: Path, manifest: str, words: str) -> None:
    with scripted_daemon(model, runtime_dir, script={"manifest": manifest}) as daemon:
        refused = failed(daemon)
        assert str(refused.found).startswith("transfer:")
        assert words in str(refused.found)


def test_a_mapping_that_the_worker_keeps_ends_with_the_worker(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, script={"keep_mapping": "worker"}) as daemon:
        daemon.wait_until("ready")
        daemon.wait_logged("a segment is still mapped after Done: sealing when the worker has ended")
        _, fds = daemon.attach()
        fds.close()


def test_a_mapping_that_outlives_the_worker_is_not_published(model: Path, runtime_dir: Path) -> None:
    """A process of the worker's can still write to the segment: sealing it is impossible, so nobody may get it."""
    stdin = runtime_dir.parent / "stdin"
    os.mkfifo(stdin)
    held = os.open(stdin, os.O_RDWR)
    try:
        script = {"keep_mapping": "child", "child_stdin": str(stdin)}
        with scripted_daemon(model, runtime_dir, script=script) as daemon:
            refused = failed(daemon)
            assert "cannot be sealed" in str(refused.found)
    finally:
        os.close(held)  # ends that process


def test_a_daemon_killed_while_it_loads_takes_its_worker_along(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, script={"hang_at": "progress"}) as daemon:
        daemon.wait_logged("progress", stage="read")
        (worker,) = children_of(daemon.pid)
        gone = os.pidfd_open(worker)
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_gone(gone)
        assert daemon.place.socket_path.is_socket()
        with pytest.raises(ConnectionRefusedError):
            daemon.connect()
    with scripted_daemon(model, runtime_dir) as successor:
        successor.wait_until("ready")
        _, fds = successor.attach()
        fds.close()


def wait_gone(pidfd: int) -> None:
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(20_000), "the process is still there"
    finally:
        os.close(pidfd)


@pytest.mark.parametrize(
    ("config", "code"), [(None, "bad_model_config"), ("{", "bad_model_config"), ("{}", "bad_model_config")]
)
def test_a_checkpoint_without_a_usable_config_is_a_failure_that_is_told(
    tmp_path: Path, runtime_dir: Path, config: str | None, code: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with scripted_daemon(tmp_path, runtime_dir) as daemon:
        report = daemon.wait_until("failed")
        assert str(report.last_error).startswith(f"{code}:")
        assert report.fingerprint is None


def test_a_model_that_is_neither_directory_nor_hub_id(runtime_dir: Path) -> None:
    with scripted_daemon(Path("/nowhere/at/all"), runtime_dir) as daemon:
        report = daemon.wait_until("failed")
        assert str(report.last_error).startswith("invalid_option:")


LIMIT_NBYTES = 192 << 20


@pytest.mark.root
@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ({"segment_nbytes": 4 * LIMIT_NBYTES}, "insufficient_memory", "weightcached-test-"),
        ({"eat_at": "memory"}, "worker_died", "out-of-memory"),
    ],
    ids=["the shard does not fit", "the worker takes too much"],
)
def test_a_cgroup_with_too_little_memory(
    model: Path, runtime_dir: Path, script: Mapping[str, Any], code: str, words: str
) -> None:
    """Both end in the state `failed`, with the keeper alive in the same group."""
    with (
        memory_limit(LIMIT_NBYTES) as group,
        scripted_daemon(model, runtime_dir, script=script, group=group) as daemon,
    ):
        refused = failed(daemon)
        assert str(refused.found).startswith(f"{code}:")
        assert words in str(refused.found)
        if code == "insufficient_memory":
            assert "bytes free" in str(refused.found)
            assert attempts_of(daemon) == 1
