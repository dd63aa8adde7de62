"""The engine's side: vLLM's loader as a process that is started once and asked for one rank after the other."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tests.engines.cases import Case, Rank
from tests.engines.held import Held
from tests.support.unprivileged import ROOT

PYTHON = ROOT / ".venv-engines" / "bin" / "python"
"""The Python that has vLLM; `make test-engines` makes it."""


class EngineError(Exception):
    """The engine does not load this; its traceback."""


class Engine:
    """vLLM's loader, running. It has loaded nothing yet, and forgets what it loads once it has answered."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process = process
        self._log = log

    def held(self, model: Path, case: Case, rank: Rank, *, processed: bool = False) -> dict[str, Held]:
        """What vLLM holds of the checkpoint ``model`` at ``rank``, but what is its own, before its post-processing or
        after. Raises EngineError.
        """
        answer = self._ask(
            model=str(model),
            tp=(rank.tp_rank, rank.tp_size),
            pp=(rank.pp_rank, rank.pp_size),
            options=case.engine_options_at(rank),
            processed=processed,
        )
        if "error" in answer:
            raise EngineError(answer["error"])
        return {
            name: Held(found["dtype"], tuple(found["shape"]), found["sha256"], tuple(found["names"]))
            for name, found in answer["parameters"].items()
            if not name.endswith(case.engine_only)
        }

    def _ask(self, **request: object) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.poll() is None:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            if line := self._process.stdout.readline():
                return json.loads(line)
        self._log.seek(0)
        raise EngineError(f"ended with {self._process.wait()}:\n{self._log.read()[-4000:]}")


@contextmanager
def running() -> Iterator[Engine]:
    """An engine, which is not asked for anything until it is ready. Its end is the end of its input.

    It is started a second time if an illegal instruction killed the first: what some builds of its libraries do now and
    then on processors without AVX-512, before they have loaded anything.
    """
    with tempfile.TemporaryFile("w+") as log, ExitStack() as processes:
        process = processes.enter_context(_started(log))
        if process.poll() == -signal.SIGILL:
            process = processes.enter_context(_started(log))
        yield Engine(process, log)


def _started(log: IO[str]) -> subprocess.Popen[str]:
    """A process that has said it is ready, or has ended."""
    process = subprocess.Popen(
        [PYTHON, ROOT / "tests" / "engines" / "vllm_loader.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        process.wait()
    return process
