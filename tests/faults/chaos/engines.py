"""The harness's side of an engine process (`engine.py`, `group_engine.py`): started, told, listened to, killed.

Owns the process. What its words mean for the contract is `invariants.py`'s.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tests.faults.chaos.broken import Broken
from tests.faults.chaos.records import Record, Records
from tests.support.unprivileged import ROOT

SETTLE_S = 30.0
HEARTBEAT_S = 0.5
Role = Literal["hold", "loop"]
ROLES: tuple[Role, ...] = ("hold", "loop")

_tokens = itertools.count(1)


class Engine:
    """A running engine, at work from its start; :meth:`check` brings it to rest, :meth:`go` ends that."""

    def __init__(
        self, program: str, role: Role, arguments: Sequence[str], *, seed: int, environment: dict[str, str], log: Path
    ) -> None:
        self.role = role
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", f"tests.faults.chaos.{program}", "--role", role, "--seed", str(seed)),
                    *("--heartbeat", str(HEARTBEAT_S), "--parent-pid", str(os.getpid()), *arguments),
                ],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        if self.process.stdout is None:
            raise ValueError("a process that was started with pipes has them")
        self.records = Records(self.process.stdout, who=f"engine {role} {self.pid}")
        self.level: Counter[str] | None = None
        """What it held when it was first looked at with a lease."""
        self._read_to = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, do: str, **words: object) -> None:
        if self.process.stdin is None:
            raise ValueError("a process that was started with pipes has them")
        try:
            self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise Broken("engine", f"engine {self.role} {self.pid} died: {self.process.poll()}") from error

    def check(self, *, rows: str) -> Record:
        """Have it settle, compare its bytes and say how it is. It then rests: it does not attach or change over."""
        token = next(_tokens)
        mark = self.records.mark()
        self.tell("check", token=token, rows=rows, within_s=SETTLE_S)
        return self.records.wait(
            lambda record: record.get("token") == token, what="its check", mark=mark, timeout_s=2 * SETTLE_S
        )

    def go(self) -> None:
        self.tell("go")

    def attach_again(self) -> Record:
        """A holding engine gives up what it has and attaches."""
        mark = self.records.mark()
        self.tell("attach")
        return self.wait_attached(mark)

    def wait_attached(self, mark: int) -> Record:
        return self.records.wait(
            lambda record: record.get("event") == "attach", what="an attach", mark=mark, timeout_s=2 * SETTLE_S
        )

    def wait_inside(self) -> None:
        """Until it is in the middle of an attach, for as long as nobody answers it."""
        last = self.records.last()
        if last is not None and last.get("event") == "begin":
            return
        self.records.wait(
            lambda record: record.get("event") == "begin",
            what="an attach to begin",
            mark=self.records.mark(),
            timeout_s=SETTLE_S,
        )

    def fork(self) -> int:
        """Have it fork a child that outlives it; the child's pid, whom the caller kills."""
        mark = self.records.mark()
        self.tell("fork")
        record = self.records.wait(
            lambda record: record.get("event") == "forked", what="a fork", mark=mark, timeout_s=SETTLE_S
        )
        pid: int = record["pid"]
        return pid

    def news(self) -> list[Record]:
        """What it said since the last call."""
        found = self.records.since(self._read_to)
        self._read_to += len(found)
        return found

    def pause(self, seconds: float) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.records.join()
