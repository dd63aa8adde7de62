"""Owns everything a run leaves on the machine while it lasts: temporary files, and processes. All gone at the end.

Children are started in process groups of their own, so that Ctrl-C reaches only the run itself, which then ends them
in order; each child also dies with the run by its own request to the kernel (`fresh.py`, ``--parent-pid``).
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_END_TIMEOUT_S = 30.0


class Workspace:
    """A context manager. ``directory`` is for files of any size, ``runtime_dir`` for sockets: their paths are short."""

    def __init__(self, parent: Path | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="weightcached-bench-", dir=parent))
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="wcbench-", dir="/tmp"))
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a process that is ended with this workspace at the latest. ``options`` are Popen's."""
        process = subprocess.Popen(command, process_group=0, text=True, **options)
        self._processes.append(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        """SIGTERM, and SIGKILL if that is ignored; waits. Safe to call for a process that has ended."""
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        if process in self._processes:
            self._processes.remove(process)

    def remove(self, path: Path) -> None:
        """Removes a folder of this workspace now, to make room."""
        if self.directory not in path.parents:
            raise ValueError(f"{path} is not in {self.directory}")
        shutil.rmtree(path)

    def close(self) -> None:
        """Ends every process, removes every file. A second Ctrl-C does not interrupt it."""
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for process in reversed(tuple(self._processes)):
                self.end(process)
            for directory in (self.directory, self.runtime_dir):
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, previous)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
