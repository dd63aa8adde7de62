"""``weightcached ctl`` and ``weightcached events``, as commands, to real daemons: what they print, and how they end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.commanding import Changer, from_directory, other_weights
from tests.support.daemons import TIMEOUT_S, scripted_daemon
from tests.support.unprivileged import ROOT

NO_TRANSACTION = "0" * 32


def run(command: str, *arguments: str, runtime_dir: Path) -> tuple[int, str]:
    status, output, _ = run_whole(command, *arguments, runtime_dir=runtime_dir)
    return status, output


def run_whole(command: str, *arguments: str, runtime_dir: Path) -> tuple[int, str, str]:
    """Exit status, output, and what was said beside it."""
    words = [sys.executable, "-m", "weightcached.daemon", *command.split(), *arguments]
    result = subprocess.run(
        [*words, "--runtime-dir", str(runtime_dir)], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return result.returncode, result.stdout, result.stderr


def ctl(command: str, *arguments: str, runtime_dir: Path) -> tuple[int, list[dict[str, Any]]]:
    status, output = run(f"ctl {command}", *arguments, "--patience", "30", runtime_dir=runtime_dir)
    return status, json.loads(output)


def test_ctl_asks_every_rank_or_those_that_are_meant(model: Path, runtime_dir: Path) -> None:
    with (
        scripted_daemon(model, runtime_dir, tp_size=2, tp_rank=0, layout="fused") as leader,
        scripted_daemon(model, runtime_dir, tp_size=2, tp_rank=1, layout="fused") as other,
    ):
        for daemon in (leader, other):
            daemon.wait_until("ready")
            daemon.wait_logged("control plane")
        status, answers = ctl("describe", runtime_dir=runtime_dir)
        assert (status, [one["place"] for one in answers]) == (0, ["default/host-tp0of2", "default/host-tp1of2"])
        held = [one["answer"]["current"] for one in answers]
        status, answers = ctl("describe", "--tp-size", "2", "--tp-rank", "1", runtime_dir=runtime_dir)
        assert [one["answer"]["current"] for one in answers] == held[1:]
        status, answers = ctl("read-decision", NO_TRANSACTION, runtime_dir=runtime_dir)
        assert (status, [one["place"] for one in answers]) == (0, ["default/host-tp0of2"])
        assert answers[0]["answer"]["outcome"] == "unknown"
        status, answers = ctl("pin", held[1], runtime_dir=runtime_dir)
        assert (status, [one["place"] for one in answers]) == (0, ["default/host-tp1of2"])
        assert [one["pinned"] for one in answers[0]["answer"]["generations"]] == [True]
        status, answers = ctl("drop", held[0], runtime_dir=runtime_dir)
        assert (status, answers[0]["error"]["code"]) == (1, "update_conflict")
        status, output, said = run_whole("ctl unpin", "f" * 32, runtime_dir=runtime_dir)
        assert (status, json.loads(output)) == (3, [])
        assert "about none of 2 daemons" in said
        for command in ("ctl describe", "events"):
            status, _, said = run_whole(command, "--name", "other", runtime_dir=runtime_dir)
            assert status == 3
            assert "no daemon serves under this name; expected: other; found: default; where: " in said


def test_ctl_with_nobody_there_or_nothing_to_say(runtime_dir: Path) -> None:
    assert ctl("status", runtime_dir=runtime_dir) == (3, [])
    status, answers = ctl("status", "--tp-size", "1", runtime_dir=runtime_dir)
    assert (status, answers[0]["error"]["code"]) == (1, "daemon_absent")
    for command in ("ctl status", "events", "generations", "release", "wait"):  # a name is one everywhere
        status, _, said = run_whole(command, "--name", "../other", runtime_dir=runtime_dir)
        assert (status, "unusable name" in said) == (64, True)
    for wrong in ("pin", "pin xyz", f"describe {NO_TRANSACTION}", f"pin {NO_TRANSACTION} --abort", "status --force"):
        assert run(f"ctl {wrong}", runtime_dir=runtime_dir)[0] == 64


def test_ctl_gives_a_change_up_and_commits_none_for_rank_0_does_not_know_what_the_others_have(
    model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    """Rank 0 has prepared it, and the other rank was never asked."""
    with scripted_daemon(model, runtime_dir, tp_size=2, tp_rank=0, layout="fused") as leader:
        leader.wait_until("ready")
        changer = Changer(leader)
        before = changer.state().current
        transaction, _ = changer.prepare(from_directory(other_weights(model, tmp_path / "other")))
        for commits in ("--commit", ""):
            status, output, said = run_whole(f"ctl decide {transaction} {commits}", runtime_dir=runtime_dir)
            assert (status, output) == (64, "")
        assert "`weightcached update --resolve`, which looks at them all" in said
        state = changer.state()
        assert (state.current, state.open) == (before, transaction)
        status, answers = ctl(f"decide {transaction} --abort", runtime_dir=runtime_dir)
        assert (status, answers[0]["answer"]["outcome"]) == (0, "aborted")


def test_events_tells_what_things_are_like_and_ends(model: Path, runtime_dir: Path) -> None:
    assert run("events", runtime_dir=runtime_dir) == (3, "")
    with scripted_daemon(model, runtime_dir) as daemon:
        report = daemon.wait_until("ready")
        daemon.wait_logged("control plane")
        status, output = run("events", runtime_dir=runtime_dir)
        assert status == 0
        assert f"default/host-tp0of1 snapshot: ready; generation {report.generation}" in output
        status, output = run("events", "--json", runtime_dir=runtime_dir)
        [event] = map(json.loads, output.splitlines())
        assert (event["kind"], event["missed"], event["generation"]) == ("snapshot", 0, report.generation)
        daemon.stop(signal.SIGKILL)
        assert run("events", runtime_dir=runtime_dir)[0] == 1


def test_following_hears_daemons_that_start_later_and_end(model: Path, runtime_dir: Path) -> None:
    command = [sys.executable, "-m", "weightcached.daemon", "events", "--follow", "--json"]
    following = subprocess.Popen(
        [*command, "--runtime-dir", str(runtime_dir)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    lines = following.stdout
    assert lines is not None
    try:

        def until(kind: str) -> dict[str, Any]:
            for line in lines:
                event: dict[str, Any] = json.loads(line)
                if event["kind"] == kind:
                    return event
            raise AssertionError("it has ended")

        for _ in range(2):
            with scripted_daemon(model, runtime_dir) as daemon:
                daemon.wait_until("ready")
                assert until("snapshot")["place"] == "default/host-tp0of1"
                lease = daemon.connect()
                grant, fds = daemon.attach(lease)
                fds.close()
                lease.close()
                assert until("lease_opened")["generation"] == grant.generation
                assert until("lease_closed")["pid"] == os.getpid()
            assert until("draining")["place"] == "default/host-tp0of1"
            assert until("lost")["place"] == "default/host-tp0of1"
    finally:
        following.send_signal(signal.SIGINT)
        assert following.wait(TIMEOUT_S) == 130
        lines.close()
