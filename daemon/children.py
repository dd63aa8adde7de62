"""Short-lived helper processes of the keeper: started by exec, watched, never left behind.

Owns starting them with the right descriptors, turning what they write to standard error into log records, and ending
them. What they say is the business of whoever started them. Each is told our pid and dies when we die
(``die_with_parent``). Used on the event loop's thread only: the kernel ties "die with parent" to the thread that
started the child. The loop is uvloop's: with asyncio's own, waiting for a process also waits for whoever else holds
its pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Sequence
from typing import Any

from weightcached.protocol.errors import ContractError, WeightCacheError, WorkerDied, error_from
from weightcached.protocol.processes import python_command

TAIL_LINES = 20
_LINE_MAX_BYTES = 64 * 1024
_LAST_WORDS_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


class Child:
    """One running helper. Whoever starts it calls :meth:`end` in the end, on every path."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._logging = asyncio.create_task(self._log_stderr(), name=f"stderr of {name}")

    @classmethod
    async def start(
        cls, name: str, module: str, arguments: Sequence[str], *, pass_fds: Sequence[int] = (), answers: bool = False
    ) -> Child:
        """Run ``python -P -m module arguments``. ``answers``: its standard output is kept for :meth:`answer`. Raises
        WorkerDied where the system has no process or descriptors for it.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *python_command(module, *arguments),
                stdin=DEVNULL,
                stdout=PIPE if answers else DEVNULL,
                stderr=PIPE,
                pass_fds=tuple(pass_fds),
                limit=_LINE_MAX_BYTES,
            )
        except OSError as error:
            raise WorkerDied(
                f"the {name} process cannot be started",
                found=error.strerror,
                next_step="see the limits of processes, descriptors and memory that the daemon runs under",
            ) from error
        log.debug("child started", extra={"child": name, "child_pid": process.pid})
        return cls(name, process)

    async def _log_stderr(self) -> None:
        stream = self.process.stderr
        while stream is not None:
            try:
                line = await stream.readline()
            except ValueError:  # a line over the limit was thrown away
                line = b"(a line that is too long to show)\n"
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self.tail.append(text)
            log.info("child says", extra={"child": self.name, "child_pid": self.process.pid, "text": text})

    async def answer(self, *, or_else: type[WeightCacheError] | None = None) -> dict[str, Any]:
        """Wait for its end and parse the one line of JSON it printed.

        Raises the error it reported, or ``or_else`` when what it printed is no answer: WorkerDied where it was killed,
        ContractError else.
        """
        stream = self.process.stdout
        if stream is None:
            raise ValueError(f"{self.name} was not started to answer")
        output = await stream.readline()
        code = await self.process.wait()
        try:
            document = json.loads(output)
            if not isinstance(document, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise (or_else or (WorkerDied if code < 0 else ContractError))(
                f"the {self.name} process ended without an answer",
                expected="one line of JSON",
                found=f"{describe_exit(code)}, {output[:200]!r}; last words: {self.last_words}",
            ) from error
        if "error" in document:
            raise error_from(document["error"])
        return document

    @property
    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        return " | ".join(self.tail) or "none"

    async def ended(self) -> int:
        """Wait until it has ended by itself and its last words are logged. Returns the exit status."""
        code = await self.process.wait()
        # A process that it started may still hold the pipe open: do not wait for that one.
        await asyncio.wait({self._logging}, timeout=_LAST_WORDS_TIMEOUT_S)
        self._logging.cancel()
        return code

    async def end(self) -> int:
        """Kill it if it still runs, then as :meth:`ended`."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, and the loop has yet to be told
                self.process.kill()
        return await self.ended()


def parent_arguments() -> list[str]:
    """What tells a helper to die with us."""
    return ["--die-with-parent", str(os.getpid())]


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
