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
def serving(
    workspace: Workspace, model_dir: Path, *, name: str, supervised: bool = False, ranks: int = 1
) -> Iterator[Daemon]:
    """A daemon that serves ``model_dir`` in layout ``hf`` until the context is left, or of several ``ranks`` one each,
    in layout ``fused``; ``supervised``, one that comes back when it is killed.

    Entered when all are ready *and* have their content digest: the process that computes that one would take a core.
    """
    place = ["--runtime-dir", str(workspace.runtime_dir), "--name", name]
    cache = ["--cache-dir", str(workspace.directory / "digests")]
    log_path = workspace.directory / f"{name}.log"
    began_s = time.monotonic()
    processes = []
    try:
        with open(log_path, "w") as log:
            for rank in range(ranks):
                ours = ("--parent-pid", str(os.getpid()))
                serve = ["--model", str(model_dir), *place, *cache]
                if ranks > 1:
                    serve += ["--layout", "fused", "--tp-size", str(ranks), "--tp-rank", str(rank)]
                command = (
                    [*_weightcached("supervise"), *ours, "--backoff-max", "0", "--", "serve", *serve]
                    if supervised
                    else [*_weightcached("serve"), *serve, *ours]
                )
                processes.append(workspace.start(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        waited = _run("wait", "--timeout", str(READY_TIMEOUT_S), "--tp-size", str(ranks), *place)
        ready_s = time.monotonic() - began_s
        if waited.returncode != 0:
            raise DaemonTrouble(f"{waited.stderr}\n{log_path.read_text()[-2000:]}")
        yield Daemon(workspace.runtime_dir, name, ready_s, _quiet_report(place, log_path))
    finally:
        for process in processes:
            workspace.end(process)


def _quiet_report(place: list[str], log_path: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        status = _run("status", "--json", *place)
        reports: list[dict[str, Any]] = json.loads(status.stdout)["daemons"]
        if all(report.get("digest") for report in reports):
            return reports[0]
        time.sleep(_LOOK_AGAIN_S)  # nothing announces a digest; asking is cheap beside computing it
    raise DaemonTrouble(f"no content digest within {READY_TIMEOUT_S:.0f} s\n{log_path.read_text()[-2000:]}")


def _weightcached(command: str) -> list[str]:
    return [sys.executable, "-P", "-m", "weightcached.daemon", command]


def _run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_weightcached(command), *arguments], capture_output=True, text=True, check=False)
