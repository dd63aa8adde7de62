"""The engine's side: vLLM as a process that is started once and asked for one thing after the other.

Either its loader (`vllm_loader.py`), for what it holds, or all of it (`vllm_generate.py`), for what it says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tests.engines.cases import Case, Rank
from tests.engines.held import Held
from tests.support.unprivileged import ROOT

PYTHON = ROOT / ".venv-engines" / "bin" / "python"
"""The Python that has vLLM; `make test-engines` makes it."""

LOADER, WHOLE = "vllm_loader.py", "vllm_generate.py"


class EngineError(Exception):
    """The engine does not do this; its traceback. ``code`` is that of the error of ours that was the cause, if any."""

    def __init__(self, text: str, *, code: str | None = None) -> None:
        super().__init__(text)
        self.code = code


class Engine:
    """A running process of vLLM. Its loader forgets what it loads once it has answered."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process = process
        self._log = log

    def held(self, model: Path, case: Case, rank: Rank, *, processed: bool = False) -> dict[str, Held]:
        """What vLLM holds of the checkpoint ``model`` at ``rank``, but what is its own, before its post-processing or
        after. Raises EngineError.
        """
        answer = self.ask(
            model=str(model),
            tp=(rank.tp_rank, rank.tp_size),
            pp=(rank.pp_rank, rank.pp_size),
            options=case.engine_options_at(rank),
            processed=processed,
        )
        return {
            name: Held(found["dtype"], tuple(found["shape"]), found["sha256"], tuple(found["names"]))
            for name, found in answer["parameters"].items()
            if not name.endswith(case.engine_only)
        }

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: object) -> dict:
        """The answer to a request. Raises EngineError."""
        self.request(**request)
        return self.answer()

    def request(self, **request: object) -> None:
        """Ask, and do not wait for the answer."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer(self) -> dict:
        """The answer to the request under way. Raises EngineError, also where the process has ended."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise EngineError(answer["error"], code=answer.get("code"))
            return answer
        raise EngineError(f"ended with {self._process.wait()}:\n{self.log()[-4000:]}")

    def log(self) -> str:
        """All that it has printed so far. The file's position is the engine's too, so it stays where it is."""
        file = self._log.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._process.kill()
        self._process.wait()


@contextmanager
def running(script: str = LOADER, environment: Mapping[str, str] | None = None) -> Iterator[Engine]:
    """An engine, which is not asked for anything until it is ready. Its end is the end of its input.

    It is started a second time if an illegal instruction killed the first: what some builds of its libraries do now and
    then on processors without AVX-512, before they have loaded anything.
    """
    with tempfile.TemporaryFile("w+") as log, ExitStack() as processes:
        process = processes.enter_context(_started(script, environment or {}, log))
        if process.poll() == -signal.SIGILL:
            process = processes.enter_context(_started(script, environment or {}, log))
        yield Engine(process, log)


def _started(script: str, environment: Mapping[str, str], log: IO[str]) -> subprocess.Popen[str]:
    """A process that has said it is ready, or has ended."""
    process = subprocess.Popen(
        [PYTHON, ROOT / "tests" / "engines" / script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        process.wait()
    return process
