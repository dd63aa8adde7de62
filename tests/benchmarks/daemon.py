"""Real daemons for benchmarks: `weightcached serve` processes, ready, and quiet (their content digest done)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.workspace import Workspace

READY_TIMEOUT_S = 600.0
_LOOK_AGAIN_S = 0.25


class DaemonTrouble(RuntimeError):
    """A daemon did not come up; the message has the end of its log."""


@dataclass(frozen=True)
class Daemon:
    """One that serves. ``report`` is what `weightcached status` said of it when it was quiet."""

    runtime_dir: Path
    name: str
    ready_s: float
    """From the start of the process to the end of `weightcached wait`."""
    report: dict[str, Any]

    def attach_arguments(self, model_dir: Path) -> dict[str, str]:
        """What a measured process passes to `attach`."""
        return {"model": str(model_dir), "runtime_dir": str(self.runtime_dir), "name": self.name}


@contextmanager
def serving(workspace: Workspace, model_dir: Path, *, name: str, supervised: bool = False) -> Iterator[Daemon]:
    """A daemon that serves ``model_dir`` in layout ``hf`` until the context is left; ``supervised``, one that comes
    back when it is killed.

    Entered when it is ready *and* has its content digest: the process that computes that one would take a core.
    """
    place = ["--runtime-dir", str(workspace.runtime_dir), "--name", name]
    cache = ["--cache-dir", str(workspace.directory / "digests")]
    log_path = workspace.directory / f"{name}.log"
    began_s = time.monotonic()
    with open(log_path, "w") as log:
        ours = ("--parent-pid", str(os.getpid()))
        serve = ["--model", str(model_dir), *place, *cache]
        process = workspace.start(
            [*_weightcached("supervise"), *ours, "--backoff-max", "0", "--", "serve", *serve]
            if supervised
            else [*_weightcached("serve"), *serve, *ours],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        waited = _run("wait", "--timeout", str(READY_TIMEOUT_S), "--tp-size", "1", *place)
        ready_s = time.monotonic() - began_s
        if waited.returncode != 0:
            raise DaemonTrouble(f"{waited.stderr}\n{log_path.read_text()[-2000:]}")
        yield Daemon(workspace.runtime_dir, name, ready_s, _quiet_report(place, log_path))
    finally:
        workspace.end(process)


def _quiet_report(place: list[str], log_path: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        status = _run("status", "--json", *place)
        report: dict[str, Any] = json.loads(status.stdout)["daemons"][0]
        if report.get("digest"):
            return report
        time.sleep(_LOOK_AGAIN_S)  # nothing announces a digest; asking is cheap beside computing it
    raise DaemonTrouble(f"no content digest within {READY_TIMEOUT_S:.0f} s\n{log_path.read_text()[-2000:]}")


def _weightcached(command: str) -> list[str]:
    return [sys.executable, "-P", "-m", "weightcached.daemon", command]


def _run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_weightcached(command), *arguments], capture_output=True, text=True, check=False)
