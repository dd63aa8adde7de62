"""An engine under chaos: attaches to one place with the client library, and looks at every byte it is given.

    python -m tests.faults.chaos.engine --role hold|loop --model DIR --runtime-dir DIR --name NAME --truth FILE …

``hold`` attaches once and keeps its weights through everything; ``loop`` attaches again and again. Both say what they
see on standard output, one JSON object a line, and take commands on standard input. Bytes are compared with digests of
the checkpoint that the harness made from its files, not only with what the daemon says about itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from xxhash import xxh3_128_hexdigest

from weightcached.client import WeightSet, attach
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.processes import die_with_parent

ATTACH_TIMEOUT_S = 40.0
_SAMPLE_ROWS = 6
_PAUSE_MAX_S = 0.12
_BETWEEN_S = 0.02

_speaking = threading.Lock()


def say(event: str, **words: Any) -> None:
    with _speaking:
        print(json.dumps({"event": event, "at_s": time.monotonic(), **words}), flush=True)


class Commands:
    """Lines of JSON on standard input. The end of it ends the process: the harness is gone."""

    def __init__(self) -> None:
        self._pending = b""

    def next(self, timeout_s: float | None) -> dict[str, Any] | None:
        while b"\n" not in self._pending:
            readable, _, _ = select.select([0], [], [], timeout_s)
            if not readable:
                return None
            data = os.read(0, 65536)
            if not data:
                sys.exit(0)
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        command: dict[str, Any] = json.loads(line)
        return command


class Engine:
    """Attaches and compares."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._truth: dict[str, str] = json.loads(Path(given.truth).read_text())
        self._random = random.Random(given.seed)
        self.weights: WeightSet | None = None

    def attach(self) -> None:
        """One attach, said with its outcome: ``daemon``, ``disk``, or the code of an error."""
        self.let_go()
        began_s = time.monotonic()
        say("begin")
        words: dict[str, Any] = {}
        try:
            self.weights = attach(
                self._given.model,
                name=self._given.name,
                runtime_dir=self._given.runtime_dir,
                cache_dir=self._given.cache_dir,
                timeout_s=ATTACH_TIMEOUT_S,
                heartbeat_s=self._given.heartbeat,
                engine_name=f"chaos {self._given.role}",
            )
        except WeightCacheError as error:
            words = {"outcome": error.code, "message": str(error)}
        else:
            self._watch_lease(self.weights)
            words = {"outcome": self.weights.source, "generation": self.weights.generation}
        say("attach", **words, seconds=time.monotonic() - began_s, **self.compare(rows="some"))

    def _watch_lease(self, weights: WeightSet) -> None:
        if (lease := weights.lease) is None or self._given.role != "hold":
            return
        lease.on_lost(lambda reason: say("lost", reason=reason))
        lease.on_resumed(lambda detached_s: say("resumed", detached_s=detached_s))
        lease.on_stale(lambda reason, _: say("stale", reason=reason))

    def compare(self, *, rows: str) -> dict[str, Any]:
        """Hash mapped bytes: of a few rows at random, or of all. Names of those that are not the checkpoint's."""
        weights = self.weights
        if weights is None:
            return {"compared": 0, "wrong": [], "missing": []}
        blocks = [segment.view() for segment in weights._open()]
        found = list(weights.manifest)
        missing = sorted(self._truth.keys() ^ {row.name for row in found})
        wrong = [row.name for row in found if row.digest.hex() != self._truth.get(row.name)]
        chosen = found if rows == "all" else self._random.sample(found, min(_SAMPLE_ROWS, len(found)))
        for row in chosen:
            data = blocks[row.segment][row.offset : row.offset + row.nbytes]
            if xxh3_128_hexdigest(data) != self._truth.get(row.name):
                wrong.append(row.name)
        return {"compared": len(chosen), "wrong": wrong[:5], "missing": missing[:5]}

    def check(self, command: dict[str, Any]) -> None:
        """Wait until the lease is settled, and compare."""
        if self.weights is not None and self.weights.lease is not None:
            self.weights.lease.wait_for("connected", "stale", timeout_s=command["within_s"])
        say(
            "checked",
            token=command["token"],
            state="none" if self.weights is None else self.weights.state,
            generation=self.generation,
            **self.compare(rows=command["rows"]),
        )

    @property
    def generation(self) -> str | None:
        return None if self.weights is None else self.weights.generation

    def let_go(self) -> None:
        if self.weights is not None:
            self.weights.close()
            self.weights = None


class Attaching(Protocol):
    """What both roles need of an engine."""

    def attach(self) -> None: ...

    def check(self, command: dict[str, Any], /) -> None: ...


def hold(engine: Attaching, commands: Commands, *, between: Callable[[], None] | None = None) -> None:
    """``between`` is called again and again, but not from a check until the engine is told to go on."""
    engine.attach()
    rests = False
    while True:
        command = commands.next(None if between is None or rests else _BETWEEN_S)
        if command is None:
            if between is not None:
                between()
            continue
        rests = command["do"] in ("check", "attach") and (rests or command["do"] == "check")
        if command["do"] == "check":
            engine.check(command)
        elif command["do"] == "attach":
            engine.attach()
        elif command["do"] == "fork":
            fork()


def fork() -> None:
    """A child that outlives us and does nothing; its end of our pipes is not to be mistaken for us."""
    pid = os.fork()
    if pid == 0:
        os.close(0)
        os.close(1)
        while True:
            signal.pause()
    say("forked", pid=pid)


def loop(engine: Attaching, commands: Commands) -> None:
    pause_s = random.Random(os.getpid())
    while True:
        engine.attach()
        command = commands.next(pause_s.uniform(0, _PAUSE_MAX_S))
        while command is not None and command["do"] != "go":
            if command["do"] == "check":
                engine.check(command)
            command = commands.next(None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=("hold", "loop"), required=True)
    for name in ("--model", "--name", "--runtime-dir", "--cache-dir", "--truth"):
        parser.add_argument(name, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--heartbeat", type=float, required=True)
    given = parser.parse_args()
    die_with_parent(given.parent_pid)
    engine, commands = Engine(given), Commands()
    (hold if given.role == "hold" else loop)(engine, commands)


if __name__ == "__main__":
    main()
