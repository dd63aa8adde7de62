"""A real keeper under a real supervisor: killed, hung, stopped, released. The weights stay as long as they should."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import TIMEOUT_S, Daemon, ask, connect, converse, supervised_daemon
from tests.support.resources import anonymous_nbytes, open_fds
from weightcached.protocol.channel import Channel
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import Frame, PeerClosed
from weightcached.protocol.messages import Event, Grant, Report, Resume

MIB = 1 << 20


@contextmanager
def channel_to(daemon: Daemon) -> Iterator[Channel]:
    channel = daemon.connect()
    try:
        yield channel
    finally:
        channel.close()


@pytest.mark.parametrize("nbytes", [4096, 400 * MIB])
def test_killed_and_ready_again_without_a_load(model: Path, runtime_dir: Path, nbytes: int) -> None:
    with supervised_daemon(model, runtime_dir, script={"segment_nbytes": nbytes}) as daemon:
        before = daemon.wait_until("ready")
        inode = os.lstat(daemon.place.socket_path).st_ino
        granted, fds = daemon.attach()
        with fds:
            for start in (2, 3):
                first = len(daemon.log.lines)
                killed = daemon.kill_keeper()
                report = daemon.wait_ready_again(first)
                assert report.pid != killed
                assert (report.generation, report.resident_nbytes) == (before.generation, nbytes)
                assert (report.bytes_read, report.starts, report.adoptions) == (0, start, start - 1)
                assert (report.vault, report.last_error) == ("kept", None)
                assert os.lstat(daemon.place.socket_path).st_ino == inode
                assert os.pread(fds[1], 1, 0) == b"\1"
                assert len(fds) == 2
        stages = [record.get("stage") for record in daemon.log.records()]
        assert stages.count("start worker") == 1, "a load after the first"
        assert anonymous_nbytes(report.pid) < 64 * MIB
        assert anonymous_nbytes(daemon.pid) < 32 * MIB
        held = [what for what in open_fds(report.pid).values() if "memfd" in what]
        assert len(held) == 3  # state, manifest, segment: none twice, after any number of lives
        grant, again = daemon.attach()
        with again:
            assert (grant.generation, grant.manifest_sha256) == (granted.generation, granted.manifest_sha256)
            assert grant.nonce != granted.nonce


def test_clients_that_attach_all_the_time_notice_nothing(model: Path, runtime_dir: Path) -> None:
    """Across kills: no error, no refusal, the same weights each time. Only who was being talked to has to ask again."""
    with supervised_daemon(model, runtime_dir, script={}) as daemon:
        before = daemon.wait_until("ready")
        daemon.wait_logged("content digest")
        hello = daemon.hello()
        _, fds = daemon.attach()
        with fds:
            written = os.pread(fds[1], 4096, 0)
        over, problems, attached = threading.Event(), [], [0, 0]

        def attach_all_the_time(number: int) -> None:
            try:
                while not over.is_set():
                    channel = connect(daemon.place)
                    try:
                        with suppress(PeerClosed), (frame := converse(channel, hello)).fds:
                            grant = frame.message
                            assert isinstance(grant, Grant), grant
                            assert grant.generation == before.generation
                            assert os.pread(frame.fds[1], 4096, 0) == written
                            attached[number] += 1
                    finally:
                        channel.close()
            except BaseException as problem:  # noqa: BLE001 - reported by the test
                problems.append(problem)

        clients = [threading.Thread(target=attach_all_the_time, args=(number,)) for number in (0, 1)]
        for client in clients:
            client.start()
        try:
            for _ in range(4):
                first = len(daemon.log.lines)
                daemon.kill_keeper()
                daemon.wait_ready_again(first)
                assert problems == []
                daemon.wait_logged("granted", first=first)
        finally:
            over.set()
            for client in clients:
                client.join(TIMEOUT_S)
        assert problems == []
        assert min(attached) > 4


def test_a_lease_is_resumed_without_mapping_anew(model: Path, runtime_dir: Path) -> None:
    with supervised_daemon(model, runtime_dir, script={}) as daemon:
        daemon.wait_until("ready")
        with channel_to(daemon) as lease:
            granted, fds = daemon.attach(lease)
            fds.close()
            first = len(daemon.log.lines)
            daemon.kill_keeper()
            with pytest.raises(ConnectionError):
                lease.receive()
        resume = Resume(
            client_version="0",
            name="engine",
            pid=os.getpid(),
            generation=granted.generation,
            manifest_sha256=granted.manifest_sha256,
        )
        with channel_to(daemon) as lease:  # at once: it waits in the backlog
            frame = resumed(lease, resume)
            with frame.fds:
                assert len(frame.fds) == 0
            grant = frame.message
            assert isinstance(grant, Grant)
            assert grant.nonce != granted.nonce
            assert grant.model_dump(exclude={"nonce", "version", "digest"}) == granted.model_dump(
                exclude={"nonce", "version", "digest"}
            )
            report = daemon.wait_ready_again(first)
            assert [one.name for one in report.leases] == ["engine"]
            assert report.attaches["resumed"] == 1
            assert daemon.stop() == 0
            event = lease.receive().message
            assert isinstance(event, Event)
            assert (event.kind, event.generation) == ("draining", granted.generation)


def resumed(lease: Channel, resume: Resume) -> Frame:
    lease.send(resume)
    while True:
        frame = lease.receive()
        if type(frame.message).__name__ != "Loading":
            return frame
        frame.fds.close()


def test_a_keeper_that_hangs_is_killed_and_adopted(model: Path, runtime_dir: Path) -> None:
    with supervised_daemon(model, runtime_dir, script={}, supervise=["--watchdog", "1"]) as daemon:
        before = daemon.wait_until("ready")
        first = len(daemon.log.lines)
        daemon.kill_keeper(signal.SIGSTOP)
        daemon.wait_logged("killing the keeper", first=first)
        report = daemon.wait_ready_again(first)
        assert (report.generation, report.bytes_read) == (before.generation, 0)


def test_a_stop_gives_everything_up_because_nobody_is_left_to_keep_it(model: Path, runtime_dir: Path) -> None:
    with supervised_daemon(model, runtime_dir, script={}) as daemon:
        pid = daemon.wait_until("ready").pid
        assert daemon.stop() == 0
        assert not daemon.place.socket_path.exists()
        assert not Path(f"/proc/{pid}").exists()


def test_a_stop_in_the_middle_of_a_restart_is_in_order_too(model: Path, runtime_dir: Path) -> None:
    with supervised_daemon(model, runtime_dir, script={}) as daemon:
        daemon.wait_until("ready")
        first = len(daemon.log.lines)
        daemon.kill_keeper()
        # Once it runs this project's code it holds the signal back; before that, it dies of it. (Before its exec it is
        # the supervisor's own image, which holds signals back for another reason.)
        started = daemon.wait_logged("keeper started", first=first)["keeper_pid"]
        process, supervisor = Path(f"/proc/{started}"), Path(f"/proc/{daemon.process.pid}")
        while (process / "cmdline").read_bytes() == (supervisor / "cmdline").read_bytes():
            pass
        while not stop_is_in_hand(process / "status"):
            pass
        assert daemon.stop() == 0
        assert not daemon.place.socket_path.exists()


def stop_is_in_hand(status: Path) -> bool:
    """Whether a process holds SIGTERM back or handles it."""
    masks = [line.split()[1] for line in status.read_text().splitlines() if line.startswith(("SigBlk:", "SigCgt:"))]
    return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)


@pytest.mark.parametrize("during", ["ready", "loading", "failed"])
def test_release_gives_everything_up(model: Path, runtime_dir: Path, during: str) -> None:
    scripts: dict[str, dict[str, Any]] = {
        "ready": {},
        "loading": {"hang_at": "progress"},
        "failed": {"fail_at": "job", "fail": {"code": "checkpoint", "message": "no"}},
    }
    with supervised_daemon(model, runtime_dir, script=scripts[during]) as daemon:
        daemon.wait_until(during)
        released = release(runtime_dir)
        assert released.returncode == 0, released.stderr
        generations = "1 generation," if during == "ready" else "0 generations,"
        assert f"default/host-tp0of1: gave up {generations}" in released.stdout
        assert not daemon.place.socket_path.exists()
        assert daemon.process.wait(TIMEOUT_S) == 0
        assert daemon.place.lock_path.exists()
        again = release(runtime_dir)
        assert (again.returncode, again.stdout) == (0, f"nothing is cached in {runtime_dir}\n")


def release(runtime_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "weightcached.daemon", "release", "--runtime-dir", str(runtime_dir), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_a_lease_is_told_and_keeps_its_memory_when_the_place_is_given_up(model: Path, runtime_dir: Path) -> None:
    with supervised_daemon(model, runtime_dir, script={}) as daemon:
        daemon.wait_until("ready")
        with channel_to(daemon) as lease:
            _, fds = daemon.attach(lease)
            with fds:
                assert release(runtime_dir, "--tp-size", "1").returncode == 0
                event = lease.receive().message
                assert isinstance(event, Event)
                assert event.kind == "draining"
                assert os.pread(fds[1], 1, 0) == b"\1"
        assert daemon.process.wait(TIMEOUT_S) == 0


def test_the_real_loader_and_a_verified_adoption(model: Path, runtime_dir: Path) -> None:
    with supervised_daemon(model, runtime_dir, "--verify-on-adopt") as daemon:
        before = daemon.wait_until("ready")
        _, fds = daemon.attach()
        with fds, OwnedFds() as again:
            first = len(daemon.log.lines)
            daemon.kill_keeper()
            report = daemon.wait_ready_again(first)
            assert (report.generation, report.bytes_read) == (before.generation, 0)
            assert report.resident_nbytes == before.resident_nbytes
            daemon.wait_logged("verified", first=first)
            grant, granted = daemon.attach()
            for position in range(len(granted)):
                again.append(granted.take(position))
            assert grant.accounting.loaded > 0
            for one, other in zip(range(len(fds)), range(len(again)), strict=True):
                assert os.fstat(fds[one]).st_ino == os.fstat(again[other]).st_ino
        with channel_to(daemon) as channel:
            answer = ask(channel, resume_of(before, "0" * 64))
        assert answer.model_dump()["code"] == "generation_gone"


def resume_of(report: Report, manifest_sha256: str) -> Resume:
    return Resume(
        client_version="0", name="e", pid=1, generation=str(report.generation), manifest_sha256=manifest_sha256
    )
