"""The commands around a daemon, as processes: `status`, `wait`, `up`, and the table of subcommands itself."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import expert_models
from tests.support.daemons import TIMEOUT_S, Log, arguments_for, scripted_daemon
from tests.support.spots import Spot
from tests.support.unprivileged import ROOT
from weightcached.client import attach
from weightcached.client.control import ctl_command
from weightcached.client.verify import against_disk
from weightcached.daemon.cli import COMMANDS
from weightcached.daemon.output import UNREAD_EXIT, UNWRITTEN_EXIT
from weightcached.daemon.text import binary_size, duration, one_line, table
from weightcached.protocol.config import build_config
from weightcached.protocol.places import Place


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`weightcached …` to its end."""
    command = [sys.executable, "-m", "weightcached.daemon", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)


def status_json(runtime_dir: Path, *more: object) -> tuple[int, list[dict[str, Any]]]:
    result = run("status", "--runtime-dir", runtime_dir, "--json", *more)
    return result.returncode, json.loads(result.stdout)["daemons"]


FAIL = {"fail_at": "job", "fail": {"code": "missing_shard", "message": "model-2.safetensors is gone"}}


@pytest.mark.parametrize("words", [["--help"], ["status", "--json"], ["digest", "MODEL"], ["plan", "MODEL", "--json"]])
def test_output_that_nobody_reads_ends_a_command_without_a_traceback(
    model: Path, runtime_dir: Path, words: list[str]
) -> None:
    """As in ``weightcached plan MODEL | head -1``."""
    unread, written = os.pipe()
    os.close(unread)
    try:
        environment = {**os.environ, "WEIGHTCACHED_RUNTIME_DIR": str(runtime_dir)}
        command = [
            sys.executable,
            "-m",
            "weightcached.daemon",
            *(str(model) if word == "MODEL" else word for word in words),
        ]
        ended = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    finally:
        os.close(written)
    assert (ended.returncode, ended.stderr) == (UNREAD_EXIT, "")


@pytest.mark.parametrize("words", [["--version"], ["digest", "--help"], ["status", "--json"]])
def test_output_that_cannot_be_written_has_a_status_of_its_own_and_a_line_without_a_traceback(
    runtime_dir: Path, words: list[str]
) -> None:
    """A full disk, and a descriptor that was closed before the command began; whether errors can be said or not."""
    environment = {**os.environ, "WEIGHTCACHED_RUNTIME_DIR": str(runtime_dir)}
    command = [sys.executable, "-m", "weightcached.daemon", *words]
    for sink, why in ((">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
        for errors in ("", "2>/dev/full", "2>&-"):
            shell = ["sh", "-c", f'exec "$@" {sink} {errors}', "sh", *command]
            ended = subprocess.run(shell, stderr=subprocess.PIPE, text=True, env=environment, timeout=TIMEOUT_S)
            assert ended.returncode == UNWRITTEN_EXIT, (shell, ended.stderr)
            assert ended.stderr.count("\n") == (errors == ""), ended.stderr
            assert (f"standard output cannot be written: {why}" in ended.stderr) is (errors == "")


def test_an_interrupted_command_ends_without_a_traceback(runtime_dir: Path) -> None:
    """As ``weightcached wait``, while a daemon that took the connection says nothing."""
    directory = runtime_dir / "default"
    directory.mkdir(mode=0o700, parents=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(directory / "host-tp0of1.sock"))
        silent.listen()
        silent.settimeout(TIMEOUT_S)
        command = [sys.executable, "-m", "weightcached.daemon", "wait", "--runtime-dir", str(runtime_dir)]
        with subprocess.Popen([*command, "--timeout", "3600"], stderr=subprocess.PIPE, text=True) as waiting:
            connection, _ = silent.accept()
            with connection:
                waiting.send_signal(signal.SIGINT)
                _, errors = waiting.communicate(timeout=TIMEOUT_S)
    assert waiting.returncode == 130
    assert "Traceback" not in errors


def test_what_ctl_is_about_may_stand_behind_options(tmp_path: Path) -> None:
    place = ["--runtime-dir", str(tmp_path)]
    for words in ([*place, "0" * 32], ["0" * 32, *place]):
        assert ctl_command.main(["drop", "--force", *words]) == ctl_command.NOBODY_EXIT


class TestStatus:
    def test_nothing_there_is_3(self, runtime_dir: Path) -> None:
        assert status_json(runtime_dir) == (3, [])
        runtime_dir.mkdir()
        result = run("status", "--runtime-dir", runtime_dir)
        assert result.returncode == 3
        assert str(runtime_dir) in result.stdout

    def test_ready_is_0_loading_is_1_failed_is_2_and_every_place_is_shown(self, model: Path, runtime_dir: Path) -> None:
        with ExitStack() as daemons:

            def started(name: str, state: str, **script: object) -> Any:
                daemon = daemons.enter_context(scripted_daemon(model, runtime_dir, name=name, script=script))
                daemon.wait_until(state)
                return daemon

            ready = started("a-ready", "ready")
            ready.wait_logged("content digest")
            lease = ready.connect()
            daemons.callback(lease.close)
            grant, fds = ready.attach(lease, name="the engine")
            fds.close()
            code, seen = status_json(runtime_dir)
            assert (code, [one["state"] for one in seen]) == (0, ["ready"])

            loading = started("b-loading", "loading", hang_at="progress")
            loading.wait_logged("progress", stage="read")
            code, seen = status_json(runtime_dir)
            assert (code, [one["state"] for one in seen]) == (1, ["ready", "loading"])
            assert (seen[1]["stage"], seen[1]["bytes_done"], seen[1]["bytes_total"]) == ("read", 2048, 4096)

            started("c-failed", "failed", **FAIL)
            code, seen = status_json(runtime_dir)
            assert (code, [one["state"] for one in seen]) == (2, ["ready", "loading", "failed"])
            assert "model-2.safetensors is gone" in seen[2]["last_error"]

            one = seen[0]
            assert one["reachable"] is True
            assert one["place"] == "a-ready/host-tp0of1"
            assert one["model"] == str(model)
            assert (one["tp_rank"], one["tp_size"]) == (0, 1)
            assert one["resident_nbytes"] == 4096
            assert one["version"] == grant.version
            assert [(lease["pid"], lease["name"]) for lease in one["leases"]] == [(os.getpid(), "the engine")]
            assert 0 < one["own_memory_nbytes"] < 64 << 20

            assert status_json(runtime_dir, "--name", "a-ready")[0] == 0
            text = run("status", "--runtime-dir", runtime_dir).stdout
            assert re.search(r"^a-ready/host-tp0of1 +ready +\S+ +tp0of1 +\w+ +- +4\.0 KiB +1 ", text, re.M), text
            assert re.search(r"^b-loading/host-tp0of1 +loading .* read 50% at ", text, re.M), text
            assert f"lease of pid {os.getpid()}" in text
            assert "last error: missing_shard: model-2.safetensors is gone" in text

    def test_a_killed_daemon_is_unreachable_and_a_stopped_one_is_not_there(
        self, model: Path, runtime_dir: Path
    ) -> None:
        with scripted_daemon(model, runtime_dir) as daemon:
            daemon.wait_until("ready")
            daemon.stop(signal.SIGKILL)
        code, (seen,) = status_json(runtime_dir)
        assert code == 2
        assert (seen["state"], seen["reachable"]) == ("unreachable", False)
        assert seen["problem"]["code"] == "daemon_unreachable"
        assert "unreachable" in run("status", "--runtime-dir", runtime_dir).stdout
        with scripted_daemon(model, runtime_dir) as daemon:
            daemon.wait_until("ready")
        assert status_json(runtime_dir) == (3, [])

    def test_a_daemon_that_is_stopped_by_sigstop_costs_its_timeout_only(self, model: Path, runtime_dir: Path) -> None:
        with scripted_daemon(model, runtime_dir) as daemon:
            daemon.wait_until("ready")
            daemon.process.send_signal(signal.SIGSTOP)
            try:
                code, (seen,) = status_json(runtime_dir, "--timeout", "0.5")
            finally:
                daemon.process.send_signal(signal.SIGCONT)
            assert (code, seen["state"]) == (2, "not_ready")

    def test_a_strangers_words_cannot_move_the_cursor(self, runtime_dir: Path) -> None:
        """A process of ours that answers anything but a report is told apart, and printed harmlessly."""
        place = Place(runtime_dir, "default", "host-tp0of1")
        place.directory.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place.socket_path))
            listener.listen()

            def answer() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"\x1b[2J\x1b[1;1H" * 10)
                    with contextlib.suppress(ConnectionError):
                        while connection.recv(4096):
                            pass

            thread = threading.Thread(target=answer)
            thread.start()
            result = run("status", "--runtime-dir", runtime_dir)
            thread.join()
        assert result.returncode == 2
        assert "protocol" in result.stdout
        assert "\x1b" not in result.stdout


class TestWait:
    @pytest.fixture
    def waiting(self, runtime_dir: Path) -> Iterator[Any]:
        """Starts `weightcached wait` in the background; what is left of it at the end is killed."""
        processes: list[subprocess.Popen[str]] = []

        def start(*arguments: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "weightcached.daemon", "wait", "--runtime-dir", str(runtime_dir)]
            process = subprocess.Popen(
                [*command, *map(str, arguments)], cwd=ROOT, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
            )
            processes.append(process)
            return process

        yield start
        for process in processes:
            process.kill()
            process.communicate()

    def test_it_starts_before_the_daemon_and_returns_when_it_is_ready(
        self, model: Path, runtime_dir: Path, waiting: Any
    ) -> None:
        any_place, named = waiting("--timeout", 60), waiting("--timeout", 60, "--tp-size", 1)
        release = runtime_dir.parent / "release"
        os.mkfifo(release)
        script = {"hang_at": "progress", "release": str(release)}
        with scripted_daemon(model, runtime_dir, script=script) as daemon:
            held = os.open(release, os.O_RDWR)
            daemon.wait_logged("progress", stage="read")
            assert any_place.poll() is None
            assert named.poll() is None
            os.write(held, b"!")  # stays there for a worker that has yet to look
            assert any_place.wait(30) == 0
            assert named.wait(30) == 0
            assert run("wait", "--runtime-dir", runtime_dir, "--timeout", 5).returncode == 0
            os.close(held)

    def test_a_failed_load_ends_it_with_the_reason(self, model: Path, runtime_dir: Path, waiting: Any) -> None:
        process = waiting("--timeout", 60, "--tp-size", 1, "--tp-rank", 0)
        with scripted_daemon(model, runtime_dir, script=FAIL):
            _, stderr = process.communicate(timeout=30)
        assert process.returncode == 2
        assert "model-2.safetensors is gone" in stderr

    def test_nothing_in_time_is_1_and_says_what_was_seen(self, model: Path, runtime_dir: Path) -> None:
        result = run("wait", "--runtime-dir", runtime_dir, "--timeout", "0.3")
        assert result.returncode == 1
        assert "no socket" in result.stderr
        with scripted_daemon(model, runtime_dir, script={"hang_at": "start"}) as daemon:
            daemon.wait_until("loading")
            result = run("wait", "--runtime-dir", runtime_dir, "--timeout", "0.5")
        assert result.returncode == 1
        assert "stage 'start worker'" in result.stderr

    def test_all_ranks_that_were_named_have_to_be_there(self, model: Path, runtime_dir: Path) -> None:
        with scripted_daemon(model, runtime_dir, tp_size=2, tp_rank=0) as daemon:
            daemon.wait_until("ready")
            result = run("wait", "--runtime-dir", runtime_dir, "--timeout", "0.5", "--tp-size", 2)
            assert result.returncode == 1
            assert "default/host-tp1of2" in result.stderr
            assert "default/host-tp0of2" not in result.stderr
            only = run("wait", "--runtime-dir", runtime_dir, "--timeout", "5", "--tp-size", 2, "--tp-rank", 0)
            assert only.returncode == 0

    def test_a_daemon_that_is_killed_and_restarted_meanwhile(
        self, model: Path, runtime_dir: Path, waiting: Any
    ) -> None:
        with scripted_daemon(model, runtime_dir, script={"hang_at": "start"}) as daemon:
            daemon.wait_until("loading")
            process = waiting("--timeout", 60)
            daemon.stop(signal.SIGKILL)
        with scripted_daemon(model, runtime_dir) as successor:
            successor.wait_until("ready")
            assert process.wait(30) == 0

    def test_a_rank_without_a_size_is_bad_usage(self, runtime_dir: Path) -> None:
        assert run("wait", "--runtime-dir", runtime_dir, "--timeout", 1, "--tp-rank", 0).returncode == 64


class TestUp:
    """With the real loader: two ranks of a tiny model."""

    PLACES = ("default/host-tp0of2", "default/host-tp1of2")

    @staticmethod
    def wait_logged(log: Log, message: str, place: str) -> None:
        record = re.compile(f'"({message}).*"{place}"|"{place}".*"({message})')
        log.wait_for(lambda line: record.search(line) is not None)

    @staticmethod
    @contextlib.contextmanager
    def started(
        model: Path, runtime_dir: Path, *more: str, tp_size: int = 2
    ) -> Iterator[tuple[subprocess.Popen[str], Log]]:
        arguments = arguments_for(model, runtime_dir, tp_size=tp_size, layout="fused")[1:]
        at = arguments.index("--tp-rank")
        command = [sys.executable, "-m", "weightcached.daemon", "up", *arguments[:at], *arguments[at + 2 :], *more]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            log = Log(process.stderr)
            yield process, log
            log.join()  # ends when nobody holds the pipe any more: every rank is gone
        finally:
            process.kill()  # and with it its ranks
            process.wait()

    def test_all_ranks_serve_and_stop_together(self, model: Path, runtime_dir: Path) -> None:
        with self.started(model, runtime_dir) as (process, log):
            assert run("wait", "--runtime-dir", runtime_dir, "--timeout", 60, "--tp-size", 2).returncode == 0
            for place in self.PLACES:
                self.wait_logged(log, "content digest|version.: .digest:", place)  # computed, or remembered
            code, seen = status_json(runtime_dir)
            assert code == 0
            assert tuple(one["place"] for one in seen) == self.PLACES
            assert len({one["fingerprint"] for one in seen}) == 2
            assert len({one["version"] for one in seen}) == 1  # one version on all ranks
            assert seen[0]["version"].startswith("digest:")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert status_json(runtime_dir) == (3, [])

    def test_stages_and_expert_ranks_are_daemons_of_their_own(self, tmp_path: Path, runtime_dir: Path) -> None:
        model = expert_models.write(tmp_path / "experts", expert_models.config_of("mixtral"))
        sizes = ["--pp-size", "2", "--ep-size", "2"]
        with self.started(model, runtime_dir, *sizes, tp_size=1) as (process, _):
            assert run("wait", "--runtime-dir", runtime_dir, "--timeout", 60, *sizes).returncode == 0
            for stage, rank in itertools.product(range(2), range(2)):
                spot = Spot(pp=2, pp_rank=stage, ep=2, ep_rank=rank)
                with attach(model, mode="require", layout="fused", runtime_dir=runtime_dir, **spot.options) as weights:
                    mine = build_config(model, layout="fused", **spot.options)
                    assert {one.verdict for one in against_disk(weights, model, mine)} == {"equal"}
            assert len({one["version"] for one in status_json(runtime_dir)[1]}) == 1
            shown = run("status", "--runtime-dir", runtime_dir).stdout
            ranks = [f"tp0of1-pp{stage}of2-ep{rank}of2" for stage, rank in itertools.product(range(2), range(2))]
            assert re.findall(r" (tp\S+) +fused +- ", shown) == ranks
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0

    def test_one_rank_that_ends_for_good_stops_all(self, model: Path, runtime_dir: Path) -> None:
        with self.started(model, runtime_dir, "--log-format", "text") as (process, log):
            log.wait_for(lambda line: re.search(r"\[rank 1\] .*listening", line) is not None)
            log.wait_for(lambda line: re.search(r"\[rank 0\] .*listening", line) is not None)
            _, seen = status_json(runtime_dir)
            os.kill(seen[1]["pid"], signal.SIGTERM)
            assert process.wait(30) == 1
        assert any("rank 1 ended" in line for line in log.lines)
        assert status_json(runtime_dir) == (3, [])

    def test_a_rank_that_is_killed_serves_the_same_weights_again(self, model: Path, runtime_dir: Path) -> None:
        with self.started(model, runtime_dir) as (process, log):
            assert run("wait", "--runtime-dir", runtime_dir, "--timeout", 60, "--tp-size", 2).returncode == 0
            before = status_json(runtime_dir)[1]
            os.kill(before[1]["pid"], signal.SIGKILL)
            log.wait_for(lambda line: '"keeper died' in line)
            assert run("wait", "--runtime-dir", runtime_dir, "--timeout", 60, "--tp-size", 2).returncode == 0
            after = status_json(runtime_dir)[1]
            assert [one["generation"] for one in after] == [one["generation"] for one in before]
            assert [one["starts"] for one in after] == [1, 2]
            assert after[0]["pid"] == before[0]["pid"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0

    def test_ranks_die_with_it(self, model: Path, runtime_dir: Path) -> None:
        with self.started(model, runtime_dir) as (process, log):
            for place in self.PLACES:
                self.wait_logged(log, "listening", place)
            process.kill()
        assert [one["state"] for one in status_json(runtime_dir)[1]] == ["unreachable"] * 2

    def test_bad_options_are_found_before_anything_is_started(self, runtime_dir: Path) -> None:
        result = run("up", "--model", "m", "--tp-size", 2, "--runtime-dir", runtime_dir, "--name", "../x")
        assert result.returncode == 64
        assert not runtime_dir.exists()


class TestTheTable:
    def test_version_and_overview(self) -> None:
        assert re.fullmatch(r"weightcached \d+\.\d+\S*\n", run("--version").stdout)
        overview = run("--help")
        assert overview.returncode == 0
        for name in COMMANDS:
            assert f"  {name} " in overview.stdout

    def test_an_unknown_command(self) -> None:
        result = run("sing")
        assert result.returncode == 64
        assert "sing" in result.stderr

    @pytest.mark.parametrize("name", ["serve", "up", "status", "wait", "digest"])
    def test_every_command_explains_itself_and_its_exit_codes(self, name: str) -> None:
        result = run(name, "--help")
        assert result.returncode == 0
        assert "exit codes:" in result.stdout

    def test_the_command_is_installed(self) -> None:
        command = Path(sys.executable).parent / "weightcached"
        assert subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout


def test_words_for_people() -> None:
    assert [binary_size(n) for n in (0, 1023, 1024, 1536, 200 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "200 MiB",
        "5.0 TiB",
    ]
    assert [duration(s) for s in (0.4, 59, 61, 7200, 200000)] == ["0s", "59s", "1m", "2h", "2d"]
    assert one_line("a\x1b[2Jb\nc") == "a\\x1b[2Jb\\nc"
    assert table([("A", "LONG"), ("wide", "x")]) == ["A     LONG", "wide  x"]
