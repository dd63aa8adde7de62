"""The whole demo, small, as a user runs it; then the commands that it ends with, as they are printed."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "WEIGHTCACHED_DEMO_TEST"


class Demo:
    """`weightcached demo` with a temporary folder of its own and a mark that all its processes inherit."""

    def __init__(self, folder: Path) -> None:
        self.temporary = folder / "tmp"
        self.elsewhere = folder / "cwd"
        self.home = folder / "home"
        for made in (self.temporary, self.elsewhere, self.home):
            made.mkdir()
        self.mark = str(folder)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WEIGHTCACHED_R")},
            "TMPDIR": str(self.temporary),
            "HOME": str(self.home),
            MARK: self.mark,
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "weightcached.daemon", "demo", *words],
            cwd=self.elsewhere,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def left(self) -> list[int]:
        """Processes that carry the mark; those on their way out are waited for."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"{MARK}={self.mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                pidfd = os.pidfd_open(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            try:
                if not select.select([pidfd], [], [], 10)[0]:
                    found.append(int(entry.name))
            finally:
                os.close(pidfd)
        return found


@pytest.fixture
def demo() -> Iterator[Demo]:
    with tempfile.TemporaryDirectory(prefix="wd-", dir="/tmp") as name:  # short: it holds sockets
        Path(name).chmod(0o755)
        yield Demo(Path(name))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_demo_agrees_and_leaves_nothing_and_its_commands_work(demo: Demo) -> None:
    done = demo.start("--size-gb", "0.01")
    out, err = done.communicate(timeout=450)
    assert done.returncode == 0, out + err
    for row in (
        "from disk, cold page cache",
        "from disk, warm page cache",
        "from the daemon, first start",
        "from the daemon, after SIGKILL",
        "fused, TP 2, rank 0, from the daemon",
        "fused, TP 2, rank 1, from disk, cold",
        "fused, fp8, from disk, warm",
    ):
        assert row in out
    assert out.count("OK: ") == 3
    assert "MISMATCH" not in out
    assert "largest difference 0" in out
    assert "demo/host-tp0of1" in out  # the status command's own table
    assert list(demo.temporary.iterdir()) == []
    assert demo.left() == []
    _commands_work(demo, out)


def _commands_work(demo: Demo, out: str) -> None:
    """A shell runs what stands under "Try next", as it stands."""
    commands = [line.strip() for line in out.partition("Try next:")[2].splitlines() if line.startswith("  ")]
    assert any(" serve " in command for command in commands)
    script = "set -e; " + "\n".join(commands) + "\nwait"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=demo.elsewhere,
        env=demo.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 143), done.stdout + done.stderr
    assert "(384 numbers)" in done.stdout
    assert "from the daemon" in done.stdout
    assert "ready" in done.stdout
    assert demo.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_stopped_leaves_nothing(demo: Demo, number: signal.Signals) -> None:
    started = demo.start("--size-gb", "0.2")
    assert started.stdout is not None
    assert "making a checkpoint" in started.stdout.readline()
    assert list(demo.temporary.iterdir()) != []
    started.send_signal(number)
    started.communicate(timeout=60)
    assert started.returncode == 128 + number
    assert list(demo.temporary.iterdir()) == []
    assert demo.left() == []


def test_a_size_that_does_not_fit_is_said_before_anything_is_made(demo: Demo) -> None:
    done = demo.start("--size-gb", "1000")
    _, err = done.communicate(timeout=60)
    assert done.returncode == 2
    assert "choose a smaller --size-gb" in err
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.parametrize("words", [["--size-gb", "0"], ["--size-gb", "x"], ["--nonsense"]])
def test_bad_options_end_with_usage(demo: Demo, words: list[str]) -> None:
    done = demo.start(*words)
    _, err = done.communicate(timeout=60)
    assert done.returncode == 64
    assert "usage: weightcached demo" in err
