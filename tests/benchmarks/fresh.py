"""Measured processes: a function called in a Python process of its own, its answer brought back. Both sides.

Why processes of their own: memory that a loader freed before would be given to the next one already faulted in, and
libraries keep buffers, threads and caches. Times are taken inside, after imports, by the function itself.

`python -m tests.benchmarks.fresh PARENT_PID MODULE:FUNCTION JSON [SETTLE_BYTES]` is the measured side: imports the
module, settles memory (`settle.py`) if it is to, calls the function with the JSON object's items, and prints one JSON
line.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.settle import settle
from tests.benchmarks.workspace import Workspace
from weightcached.protocol.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Answer:
    """What the function returned, and seconds from the process's start until its imports were done."""

    value: dict[str, Any]
    imports_s: float


class MeasuredFailure(RuntimeError):
    """The measured process failed; the message has its last words."""


def command(function: str, arguments: Mapping[str, Any], *, settle_nbytes: int = 0) -> list[str]:
    """The command line of a measured process. ``function`` is ``module:name`` below `tests.benchmarks`."""
    words = [str(os.getpid()), function, json.dumps(arguments), str(settle_nbytes)]
    return [sys.executable, "-m", "tests.benchmarks.fresh", *words]


def call(
    workspace: Workspace,
    function: str,
    *,
    environment: Mapping[str, str] | None = None,
    settle_nbytes: int = 0,
    **arguments: Any,
) -> Answer:
    """Calls ``function`` in a new process and waits for it. Raises MeasuredFailure."""
    began_s = time.monotonic()
    process = workspace.start(
        command(function, arguments, settle_nbytes=settle_nbytes),
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, errors = process.communicate()
    finally:
        workspace.end(process)
    if process.returncode != 0:
        raise MeasuredFailure(f"{function} ended with {process.returncode}: {errors[-2000:]}")
    answer = json.loads(output.splitlines()[-1])
    return Answer(answer["value"], answer["imported_s"] - began_s)  # one clock for all processes (CLOCK_MONOTONIC)


def main(parent_pid: str, function: str, arguments: str, settle_nbytes: str = "0") -> None:
    die_with_parent(int(parent_pid))
    module, _, name = function.partition(":")
    target = getattr(importlib.import_module(f"tests.benchmarks.{module}"), name)
    imported_s = time.monotonic()
    if int(settle_nbytes):
        settle(int(settle_nbytes))
    print(json.dumps({"value": target(**json.loads(arguments)), "imported_s": imported_s}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
