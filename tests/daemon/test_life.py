"""A daemon beside others: started twice, stopped politely or not, replaced; its socket file tells the truth."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.daemons import (
    TIMEOUT_S,
    Daemon,
    arguments_for,
    ask,
    connect,
    converse,
    modules_file,
    scripted_daemon,
)
from tests.support.unprivileged import NOBODY, ROOT, command_as, folder_for_everyone
from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.framing import HEADER, PeerClosed, encode_frame
from weightcached.protocol.messages import CLIENT_TO_DAEMON, Event, Grant, Loading, Ping, Pong, Refused, Report, Status


def serve_again(daemon: Daemon) -> subprocess.CompletedProcess[str]:
    """A second `weightcached serve` for the same place, to its end."""
    command = [sys.executable, "-m", "weightcached.daemon", *arguments_for(daemon.model_dir, daemon.place.runtime_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)


def next_message(channel: Channel) -> object:
    with (frame := channel.receive(deadline=Deadline.after(30))).fds:
        return frame.message


def closed(channel: Channel) -> bool:
    with pytest.raises(PeerClosed):
        channel.receive(deadline=Deadline.after(30))
    return True


def test_a_second_daemon_refuses_to_start_and_names_the_first(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        second = serve_again(daemon)
        assert second.returncode == 1
        assert f"pid {daemon.pid}" in second.stderr
        _, fds = daemon.attach()
        fds.close()


def test_sigterm_ends_leases_and_leaves_no_socket(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        lease, idle = daemon.connect(), daemon.connect()
        try:
            grant, fds = daemon.attach(lease)
            assert ask(idle, Ping(token=1)) == Pong(token=1)
            assert daemon.stop() == 0
            event = next_message(lease)
            assert isinstance(event, Event)
            assert (event.kind, event.generation) == ("draining", grant.generation)
            assert closed(lease)
            told = next_message(idle)
            assert isinstance(told, Refused)
            assert told.code == "daemon_draining"
            assert closed(idle)
            with fds:  # what was granted lives on
                assert os.pread(fds[1], 1, 0) == b"\1"
                assert os.fstat(fds[0]).st_size == grant.manifest_nbytes
        finally:
            lease.close()
            idle.close()
        assert not daemon.place.socket_path.exists()
        assert daemon.place.lock_path.exists()
        assert not daemon.place.binding_path.exists()


def test_sigint_is_as_good(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        assert daemon.stop(signal.SIGINT) == 0


def test_sigterm_while_loading_refuses_who_waits_and_ends_the_worker(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, script={"hang_at": "progress"}) as daemon:
        daemon.wait_logged("progress", stage="read")
        channel = daemon.connect()
        try:
            channel.send(daemon.hello())
            assert isinstance(next_message(channel), Loading)
            started = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - started < 8  # ended, not waited for
            while isinstance(message := next_message(channel), Loading):
                pass
            assert isinstance(message, Refused)
            assert message.code == "daemon_draining"
        finally:
            channel.close()
        assert not daemon.place.socket_path.exists()


def test_sigterm_in_the_state_failed(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(
        model, runtime_dir, script={"fail_at": "job", "fail": {"code": "checkpoint", "message": "no"}}
    ) as daemon:
        daemon.wait_until("failed")
        assert daemon.stop() == 0
        assert not daemon.place.socket_path.exists()


def half_a_request(daemon: Daemon) -> Channel:
    """A connection on which a request has begun and not ended: an exchange under way."""
    channel = daemon.connect()
    assert ask(channel, Ping(token=1)) == Pong(token=1)
    channel.connection.sendall(encode_frame(CLIENT_TO_DAEMON, Ping(token=2))[: HEADER.size])
    assert isinstance(daemon.report(), Report)  # by now the daemon has seen the first half
    return channel


def rest_of_the_request(channel: Channel) -> None:
    channel.connection.sendall(encode_frame(CLIENT_TO_DAEMON, Ping(token=2))[HEADER.size :])


def test_a_successor_that_comes_before_the_first_has_gone(model: Path, runtime_dir: Path) -> None:
    """Between SIGTERM and clean-up the place is still the first one's: the second names it and touches nothing."""
    with scripted_daemon(model, runtime_dir, "--drain-timeout", "60", "--exchange-timeout", "60") as daemon:
        daemon.wait_until("ready")
        unfinished = half_a_request(daemon)
        try:
            before = daemon.place.socket_path.stat()
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_logged("state", state="draining")
            second = serve_again(daemon)
            assert second.returncode == 1
            assert f"pid {daemon.pid}" in second.stderr
            assert os.path.samestat(before, daemon.place.socket_path.stat())
            late = connect(daemon.place)
            try:
                refused = converse(late, daemon.hello()).message
                assert isinstance(refused, Refused)
                assert refused.code == "daemon_draining"
            finally:
                late.close()
            rest_of_the_request(unfinished)
            assert next_message(unfinished) == Pong(token=2)  # what was under way was answered
            assert closed(unfinished)
        finally:
            unfinished.close()
        assert daemon.stop() == 0
    with scripted_daemon(model, runtime_dir) as successor:
        successor.wait_until("ready")
        assert successor.place.socket_path.is_socket()


def test_draining_has_an_end(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, "--drain-timeout", "0.3", "--exchange-timeout", "60") as daemon:
        daemon.wait_until("ready")
        unfinished = half_a_request(daemon)
        try:
            assert daemon.stop() == 0
            assert closed(unfinished)
        finally:
            unfinished.close()


def test_a_second_signal_hurries(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, "--drain-timeout", "600", "--exchange-timeout", "600") as daemon:
        daemon.wait_until("ready")
        unfinished = half_a_request(daemon)
        try:
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_logged("state", state="draining")
            assert daemon.stop() == 0
            assert not daemon.place.socket_path.exists()
        finally:
            unfinished.close()


def test_a_killed_daemon_leaves_its_socket_and_the_next_takes_over(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        first = daemon.wait_until("ready")
        lease = daemon.connect()
        try:
            grant, fds = daemon.attach(lease)
            assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
            assert closed(lease)
        finally:
            lease.close()
        assert daemon.place.socket_path.is_socket()
        with pytest.raises(ConnectionRefusedError):
            connect(daemon.place)
    with scripted_daemon(model, runtime_dir) as successor, fds:
        assert successor.wait_until("ready").pid != first.pid
        again, more = successor.attach()
        more.close()
        assert again.nonce != grant.nonce
        assert again.generation != grant.generation
        assert os.pread(fds[1], 1, 0) == b"\1"  # the dead daemon's memory is the engine's as long as it holds it


def test_two_names_are_two_places(model: Path, runtime_dir: Path) -> None:
    with (
        scripted_daemon(model, runtime_dir, name="blue") as blue,
        scripted_daemon(model, runtime_dir, name="green") as green,
    ):
        assert blue.wait_until("ready").place == "blue/host-tp0of1"
        assert green.wait_until("ready").place == "green/host-tp0of1"


@pytest.mark.root
def test_another_user_is_kept_out_or_let_in_as_told(model: Path) -> None:
    """By default not even the socket can be opened; with an allow-list whoever is not on it is told so."""
    program = (
        "import sys, json\n"
        "from pathlib import Path\n"
        "from tests.support.daemons import ask, connect\n"
        "from weightcached.protocol.messages import Status\n"
        "from weightcached.protocol.places import Place\n"
        "try:\n"
        "    channel = connect(Place(Path(sys.argv[1]), 'default', 'host-tp0of1'))\n"
        "except PermissionError:\n"
        "    print('no permission'); sys.exit()\n"
        "message = ask(channel, Status())\n"
        "print(type(message).__name__, getattr(message, 'code', ''))\n"
    )

    def as_nobody(folder: Path) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = command_as(NOBODY, [sys.executable, "-c", program, folder / "run"])
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=True)
        return result.stdout.strip()

    expected = {(): "no permission", ("--allow-uid", "12345"): "Refused untrusted_client"}
    expected[("--allow-gid", str(NOBODY))] = "Report"
    for arguments, outcome in expected.items():
        with folder_for_everyone() as folder, scripted_daemon(model, folder / "run", *arguments) as daemon:
            daemon.wait_logged("listening")
            assert as_nobody(folder) == outcome, arguments


def test_a_path_too_long_is_found_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightcached.daemon", "serve", "--model", str(model)]
    command += ["--runtime-dir", str(tmp_path / ("x" * 100))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert result.returncode == 1
    assert "too long" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_keeper_stays_small_and_free_of_torch(model: Path, runtime_dir: Path) -> None:
    """After a load, a digest, a thousand exchanges and fifty engines at once, with the control plane there."""
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        daemon.wait_logged("content digest")
        daemon.wait_logged("control plane")
        channel = daemon.connect()
        try:
            for _ in range(1000):
                report = ask(channel, Status())
        finally:
            channel.close()
        held = []
        for _ in range(50):
            lease = daemon.connect()
            grant, fds = daemon.attach(lease)
            assert isinstance(grant, Grant)
            held.append((lease, fds))
        report = daemon.report()
        for lease, fds in held:
            fds.close()
            lease.close()
        assert report.lease_count == 50
        assert 1 << 20 < report.own_memory_nbytes < 64 << 20
        maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        for unwanted in ("torch", "numpy", "/memfd:weightcached"):
            assert unwanted not in maps
        assert "uvloop" in maps  # the list does show libraries
    imported = {name.partition(".")[0] for name in modules_file(runtime_dir).read_text().split()}
    assert imported & {"torch", "numpy", "safetensors", "transformers", "huggingface_hub"} == set()
    assert "uvloop" in imported
    assert "weightcached.loader" not in modules_file(runtime_dir).read_text().split()


def test_a_hub_id_is_resolved_outside_the_keeper(
    model: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the local hub cache, without a network; huggingface_hub never enters the keeper."""
    hub = runtime_dir.parent / "hub"
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = hub / "models--some--tiny" / "snapshots" / revision
    shutil.copytree(model, snapshot)
    (hub / "models--some--tiny" / "refs").mkdir()
    (hub / "models--some--tiny" / "refs" / "main").write_text(revision)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with scripted_daemon(Path("some/tiny"), runtime_dir) as daemon:
        report = daemon.wait_until("ready")
        assert report.model == "some/tiny"
        daemon.model_dir = snapshot
        grant, fds = daemon.attach()
        fds.close()
        assert grant.provenance.revision == revision
    assert "huggingface_hub" not in modules_file(runtime_dir).read_text().split()
    with scripted_daemon(Path("some/other"), runtime_dir) as daemon:
        assert "some/other" in str(daemon.wait_until("failed").last_error)
