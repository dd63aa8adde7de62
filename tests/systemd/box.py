"""A box with a real systemd in it: the system manager as process 1 of its own namespaces, on a throw-away copy of this
machine. It boots in about a second, and nothing in it outlives it.

    with running_box() as box:
        box.run("systemctl", "is-system-running")

Needs root, systemd, dbus and util-linux, and a cgroup v2 hierarchy: :func:`missing` says what is not there. This
machine's files are seen through an overlay; what is written lands in memory. The box dies with the process that made
it.

Another systemd than this machine's is tried with ``WEIGHTCACHED_BOX_ROOT=DIR``, the root of another system that this
Python runs on: ``debootstrap --include=systemd-sysv,dbus,procps,libssl3t64,libffi8 trixie DIR`` makes one.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.daemons import Log
from tests.support.unprivileged import ROOT

TIMEOUT_S = 60.0
"""For whatever has to happen; generous, because the machine may be busy."""
TREES = tuple(dict.fromkeys(Path(tree).resolve() for tree in (ROOT, sys.prefix, sys.base_prefix)))
"""This clone, its Python environment, and the Python behind it."""

_BASE = Path(os.environ.get("WEIGHTCACHED_BOX_ROOT", "/"))
_SYSTEMD = _BASE / "lib/systemd/systemd"
_DBUS = _BASE / "usr/bin/dbus-daemon"
_TOOLS = ("unshare", "nsenter", "setpriv", "systemctl", "systemd-analyze")
_BOOT = Path(__file__).with_name("boot.sh")
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
_ENVIRONMENT = {"PATH": f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}


def missing() -> str | None:
    """What a box would need and this machine lacks, or ``None``."""
    if os.geteuid() != 0:
        return "needs root"
    for name, file in (("systemd", _SYSTEMD), ("dbus", _DBUS)):
        if not file.exists():
            return f"needs {name} (apt-get install {name})"
    if lacking := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(lacking)}"
    hierarchy = _cgroup2()
    if hierarchy is None or not os.access(hierarchy, os.W_OK):
        return "needs a cgroup v2 hierarchy that can be written"
    return None


def _cgroup2() -> Path | None:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return next((Path(point) for _, point, kind, *_ in mounts if kind == "cgroup2"), None)


@dataclass(frozen=True)
class Started:
    """A program that runs in a box. ``log`` is what it writes to standard output."""

    process: subprocess.Popen[str]
    log: Log

    def end(self) -> int:
        """Close its standard input and wait for its end; the exit status. Safe to call twice."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(TIMEOUT_S)
        self.log.join()
        return status


class Box:
    """A running box. Made by :func:`running_box`. ``pid`` is its process 1, as seen from out here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def path(self, inside: str | Path) -> Path:
        """The way from out here to a file inside; a socket there can be connected to."""
        return Path(f"/proc/{self.pid}/root") / str(inside).lstrip("/")

    def write(self, inside: str, text: str) -> None:
        """Write a file, and the folders above it."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """What runs ``argv`` inside, as root."""
        return ["nsenter", "-t", str(self.pid), *_NAMESPACES, "--", *map(str, argv)]

    def run(self, *argv: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Run to the end. With ``ok``, an AssertionError with its output if it fails."""
        done = subprocess.run(
            self.command(argv),
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert not ok or done.returncode == 0, f"{argv}: status {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    @contextmanager
    def started(self, *argv: str | Path) -> Iterator[Started]:
        """Start inside, as root. Killed at the end if it still runs."""
        process = subprocess.Popen(
            self.command(argv), env=_ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started = Started(process, Log(process.stdout))
        try:
            yield started
        finally:
            _kill_children(process.pid)  # `nsenter` waits out here, and ends as what it started does
            started.end()

    @property
    def systemd_version(self) -> int:
        return int(self.run("systemctl", "--version").stdout.split()[1])

    def show(self, unit: str, key: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--property", key, "--value", "--", unit).stdout.strip()

    def main_pid(self, unit: str) -> int:
        """The unit's main process, as seen from out here. An AssertionError when it has none."""
        inside = int(self.show(unit, "MainPID"))
        assert inside > 1, f"{unit} has no main process:\n{self.log(unit)}"
        return self.outside(inside)

    def outside(self, inside: int) -> int:
        """A process id inside, as seen from out here."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _pid_inside(entry, space) == inside:
                return int(entry.name)
        raise AssertionError(f"no process {inside} in the box")

    def log(self, unit: str) -> str:
        """What the journal has of a unit."""
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit, ok=False).stdout


def _pid_inside(entry: Path, space: str) -> int | None:
    try:
        if os.readlink(entry / "ns/pid") != space:
            return None
        lines = (entry / "status").read_text().splitlines()
    except OSError:  # it ended meanwhile
        return None
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), None)


@contextmanager
def running_box(trees: Sequence[Path] = TREES) -> Iterator[Box]:
    """A box that has booted. Everything in it is killed at the end."""
    hierarchy = _cgroup2()
    assert hierarchy is not None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-box-", dir="/tmp")))
        (folder / "scratch").mkdir()
        (folder / "channel").mkdir()
        notify = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        notify.bind(str(folder / "channel/notify"))
        group = hierarchy / f"weightcached-box-{os.getpid()}-{folder.name[-8:]}"
        group.mkdir()
        stack.callback(_remove_groups, group)
        log = stack.enter_context(open(folder / "log", "w+"))
        # `unshare` waits outside the namespaces. It dies with us, and process 1 inside dies with it.
        outer = subprocess.Popen(
            [
                *("sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(group), "setpriv", "--pdeathsig", "KILL"),
                *("unshare", *_NAMESPACES, "--fork", "--kill-child", "--propagation", "private"),
                *("sh", str(_BOOT), str(_BASE), f"{folder}/scratch", f"{folder}/channel", *map(str, trees)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        stack.callback(_end, outer)
        _await_ready(notify, outer, folder / "log")
        notify.close()  # it says more later, and would stand still where nobody reads that
        [inner] = _children(outer.pid)
        yield Box(inner)


def _await_ready(notify: socket.socket, outer: subprocess.Popen[bytes], log: Path) -> None:
    """Until process 1 says that it has booted."""
    said, died = notify.fileno(), os.pidfd_open(outer.pid)
    try:
        while True:
            readable, _, _ = select.select([said, died], [], [], TIMEOUT_S)
            assert said in readable, f"systemd did not come up:\n{log.read_text()}"
            if b"READY=1" in notify.recv(4096).split(b"\n"):
                return
    finally:
        os.close(died)


def _end(outer: subprocess.Popen[bytes]) -> None:
    """Kill process 1 inside: the kernel ends everything in there before it is gone."""
    if outer.poll() is None:
        _kill_children(outer.pid)
        outer.wait(TIMEOUT_S)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _kill_children(pid: int) -> None:
    for child in _children(pid):
        os.kill(child, signal.SIGKILL)


def _remove_groups(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        os.rmdir(folder)
