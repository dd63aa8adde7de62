"""Real supervisors for tests: start `weightcached supervise` with a child that obeys (`kept_child.py`).

with supervised() as supervisor:
    life = supervisor.next_life()                 # a child has started, and says what it was handed
    life.ask("store", name="a", text="…")
    life.kill(signal.SIGKILL)
    again = supervisor.next_life()
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.daemons import Log

TIMEOUT_S = 30.0
CHILD = Path(__file__).with_name("kept_child.py")
BRIEF_CHILD = Path(__file__).with_name("brief_child.py")
SUPERVISE = (
    sys.executable,
    "-P",
    "-c",
    "import sys; from weightcached.daemon.supervise import main; sys.exit(main(sys.argv[1:]))",
)


class Life:
    """One child, from when it said who it is. Its death is the end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        self._stream = connection.makefile("rwb")
        connection.close()
        self.hello = self.next_line()

    @property
    def pid(self) -> int:
        pid: int = self.hello["pid"]
        return pid

    @property
    def handed(self) -> list[dict[str, Any]]:
        handed: list[dict[str, Any]] = self.hello["handed"]
        return handed

    @property
    def names(self) -> list[str]:
        return [each["name"] for each in self.handed]

    def next_line(self) -> dict[str, Any]:
        """What it says next. An AssertionError when it is dead."""
        line = self._stream.readline()
        assert line, "the child is dead"
        words: dict[str, Any] = json.loads(line)
        return words

    def tell(self, do: str, **words: Any) -> None:
        self._stream.write(json.dumps({"do": do, **words}).encode() + b"\n")
        self._stream.flush()

    def ask(self, do: str, **words: Any) -> Any:
        """Tell, and wait for the answer."""
        self.tell(do, **words)
        return self.next_line()["answer"]

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait_dead(self) -> None:
        """Returns when the child has closed its end."""
        with contextlib.suppress(ConnectionResetError):  # it died with something unread
            assert self._stream.readline() == b""

    def close(self) -> None:
        self._stream.close()


class Supervised:
    """A running supervisor. Made by :func:`supervised`."""

    def __init__(self, process: subprocess.Popen[str], control: socket.socket) -> None:
        self.process = process
        self.log = Log(process.stderr)
        self._control = control
        self._lives: list[Life] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def next_life(self) -> Life:
        """Wait until a child has started."""
        connection, _ = self._control.accept()
        life = Life(connection)
        self._lives.append(life)
        return life

    def logged(self, message: str) -> list[dict[str, Any]]:
        """The records so far with this message."""
        records = [json.loads(line) for line in self.log.lines if line.startswith("{")]
        return [record for record in records if record["message"] == message]

    def wait_logged(self, message: str, **fields: object) -> dict[str, Any]:
        """Wait for a log record with this message and these fields."""

        def wanted(line: str) -> bool:
            record = json.loads(line) if line.startswith("{") else {}
            return record.get("message") == message and all(record.get(key) == value for key, value in fields.items())

        record: dict[str, Any] = json.loads(self.log.wait_for(wanted))
        return record

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; the exit status."""
        status = self.process.wait(TIMEOUT_S)
        self.log.join()
        return status

    def close(self) -> None:
        for life in self._lives:
            life.close()
        self._control.close()


@contextmanager
def supervised(
    *options: str,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    child: Sequence[str | Path] = ("-P", CHILD),
    program: Sequence[str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Iterator[Supervised]:
    """A supervisor of `kept_child.py`, of another ``child`` (options and a file for Python, which is given the control
    socket), or of any ``program``. Killed at the end if it still runs, and its child with it.

    ``prefix`` is a command that runs the supervisor's.
    """
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as folder:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        control.bind(f"{folder}/control")
        control.listen()
        control.settimeout(TIMEOUT_S)
        command = program or (sys.executable, *map(str, child), f"{folder}/control")
        # A test run that is killed takes its supervisors with it. (What a prefix starts is not our child.)
        dying = [] if prefix else ["--parent-pid", str(os.getpid())]
        process = subprocess.Popen(
            [*prefix, *SUPERVISE, "--log-format", "json", "--log-level", "debug", *dying, *options, "--", *command],
            env={**os.environ, "TMPDIR": folder, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=tuple(pass_fds),
            text=True,
        )
        running = Supervised(process, control)
        try:
            yield running
        except BaseException:
            print("the supervisor's log:", *running.log.lines, sep="\n")
            raise
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            running.log.join()
            running.close()
