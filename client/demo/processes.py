"""Owns the demo's child processes: started here, watched, and ended here whatever happens.

Each writes its log to a file of its own; a step that fails shows the end of it. Children get nothing from the user's
configuration: their runtime directory and their memory of digests are folders of the demo.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from weightcached.client.stopping import signals_later
from weightcached.protocol.deadline import Deadline

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
_LOG_TAIL_LINES = 15


class StepFailed(Exception):
    """A step of the demo did not do what it should; the message says which, and what its log says."""


class Workshop:
    """The demo's folder and its children. A context manager: leaving it ends every child that still runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime_dir = folder / "run"
        self.logs = folder / "logs"
        self._temporary = folder / "tmp"  # torch leaves a folder in it
        for made in (self.logs, self._temporary):
            made.mkdir()
        self._children: list[Child] = []
        self._environment = {
            **os.environ,
            "WEIGHTCACHED_RUNTIME_DIR": str(self.runtime_dir),
            "WEIGHTCACHED_CACHE_DIR": str(folder / "digests"),
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self._temporary),
        }

    def weightcached(self, name: str, *words: str) -> Child:
        """Starts `weightcached WORDS`. ``name`` names its log."""
        return self.python(name, "-m", "weightcached.daemon", *words)

    def python(self, name: str, *words: str) -> Child:
        """Starts Python with ``words``. Only the main thread may."""
        with signals_later():  # or a signal could leave a child that nobody knows of
            child = Child(name, [sys.executable, *words], log=self.logs / f"{name}.log", environment=self._environment)
            self._children.append(child)
        return child

    def wait_ready(self, daemon: Child, name: str, *, tp_size: int = 1, tp_rank: int = 0) -> None:
        """Returns once `weightcached wait` says so. Raises StepFailed when it does not, or ``daemon`` ends before."""
        words = ["--name", name, "--tp-size", str(tp_size), "--tp-rank", str(tp_rank)]
        waiter = self.weightcached("wait", "wait", "--timeout", str(START_TIMEOUT_S), *words)
        if _first_to_end(daemon, waiter) is daemon:
            raise daemon.failed("ended before it was ready")
        waiter.finish()

    def __enter__(self) -> Workshop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._children:
            self._children.pop().stop()


def _first_to_end(*children: Child) -> Child:
    """Blocks until one of the children has ended."""
    pidfds = {os.pidfd_open(child.pid): child for child in children}
    try:
        ended, _, _ = select.select(list(pidfds), [], [])
        return pidfds[ended[0]]
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


class Child:
    """One process, its standard output in a pipe, its standard error in ``log``."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._log = log
        self._buffer = b""
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, env=environment
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def json_line(self, *, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """The next line of its standard output, parsed. Raises StepFailed when it ends or takes too long instead."""
        line = self._read_until(b"\n", Deadline.after(timeout_s))
        try:
            parsed = json.loads(line)
        except ValueError as error:
            raise self.failed(f"said {line[:200]!r} instead of a line of JSON") from error
        if not isinstance(parsed, dict):
            raise self.failed(f"said {line[:200]!r} instead of an object")
        return parsed

    def output(self, *, timeout_s: float = START_TIMEOUT_S) -> str:
        """Waits for its end; all it wrote to standard output. Raises StepFailed for another exit status than 0."""
        rest = self._read_until(None, Deadline.after(timeout_s))
        self.finish(timeout_s=STOP_TIMEOUT_S)
        return rest.decode(errors="replace")

    def finish(self, *, timeout_s: float = STOP_TIMEOUT_S, status: int = 0) -> None:
        """Waits for its end. Raises StepFailed when it does not come, or with another exit status."""
        try:
            found = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self.failed(f"still runs after {timeout_s:.0f} s") from error
        if found != status:
            raise self.failed(f"ended with status {found}, not {status}")

    def terminate(self) -> None:
        """SIGTERM, and waits for an orderly end. Raises StepFailed when there is none."""
        self._process.terminate()
        self.finish()

    def kill(self) -> None:
        """SIGKILL, waited for."""
        self._process.kill()
        self.finish(status=-signal.SIGKILL)

    def stop(self) -> None:
        """For clean-up: SIGTERM, then SIGKILL. Never raises for a child that is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def failed(self, what: str) -> StepFailed:
        """The error for this child, with the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        log = "\n".join(f"    {line}" for line in lines) or "    (empty)"
        return StepFailed(f"{self.name} {what}; the end of its log:\n{log}")

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory by the kernel's kinds: ``RssAnon`` (its own), ``RssShmem`` (shared), ``RssFile``."""
        found = {}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.startswith("Rss"):
                found[name] = int(value.split()[0]) * 1024
        return found

    def _read_until(self, mark: bytes | None, deadline: Deadline) -> bytes:
        """Output up to ``mark``, or up to its end where ``mark`` is ``None``."""
        stream = self._process.stdout
        if stream is None:
            raise self.failed("has no standard output")
        while mark is None or mark not in self._buffer:
            ready, _, _ = select.select([stream], [], [], deadline.remaining_s())
            if not ready:
                raise self.failed("did not answer in time")
            data = os.read(stream.fileno(), 65536)
            if not data:
                if mark is None:
                    break
                status = self._process.wait(STOP_TIMEOUT_S)
                raise self.failed(f"ended with status {status}")
            self._buffer += data
        if mark is None:
            found, self._buffer = self._buffer, b""
        else:
            found, _, self._buffer = self._buffer.partition(mark)
        return found
