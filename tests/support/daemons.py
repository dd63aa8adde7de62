"""Real daemons for tests: start `weightcached serve` as a process, talk to it over its socket, read its log, stop it.

    with daemon(model_dir, runtime_dir) as served:     # SIGTERM at the end, and it must have exited with 0
        served.wait_until("ready")
        grant, fds = served.attach()

`scripted_daemon` starts the same daemon with `scripted_worker.py` in place of the loader: it needs no torch, starts in
a fraction of a second, and can be told to fail in any way (see that module).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.unprivileged import ROOT
from weightcached.protocol.channel import Channel
from weightcached.protocol.config import abbreviated, build_config
from weightcached.protocol.content import open_weights, take_receipts, weight_files
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import Frame, PeerClosed
from weightcached.protocol.hashing import content_digest
from weightcached.protocol.messages import (
    CLIENT_TO_DAEMON,
    DAEMON_TO_CLIENT,
    Event,
    Grant,
    Hello,
    Loading,
    Message,
    Report,
    Status,
    Unproven,
)
from weightcached.protocol.places import Place, host_device

TIMEOUT_S = 60.0
"""For things that have to happen; generous, because the machine may be busy."""

_SCRIPTED_PROGRAM = """
import os, sys
if group := os.environ.get("WEIGHTCACHED_TEST_CGROUP"):
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
import weightcached.daemon.connection as connection, weightcached.daemon.worker_process as worker_process
import weightcached.daemon.acquiring as acquiring, weightcached.daemon.reproving as reproving
worker_process.WORKER_MODULE = "tests.support.scripted_worker"
acquiring.RETRY_DELAYS_S = (0.05, 0.05, 0.05)
reproving.RETRY_FIRST_S = 0.2
if broken := os.environ.get("WEIGHTCACHED_TEST_BREAKS"):
    setattr(acquiring if broken == "examine" else connection, broken, lambda *_: 1 / 0)
from weightcached.daemon.cli import main
status = main(sys.argv[1:])
with open(os.environ["WEIGHTCACHED_TEST_MODULES"], "w") as file:
    file.write("\\n".join(sys.modules))
sys.exit(status)
"""

REAL = (sys.executable, "-P", "-m", "weightcached.daemon")
"""The command `weightcached`."""
SCRIPTED = (sys.executable, "-c", _SCRIPTED_PROGRAM)
"""The same with the scripted worker."""


class Log:
    """What a process writes to standard error, line by line, read by a thread so that the process never blocks."""

    def __init__(self, stream: Any) -> None:
        self.lines: list[str] = []
        self._stream = stream
        self._arrived = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="log reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stream:
            with self._arrived:
                self.lines.append(line.rstrip("\n"))
                self._arrived.notify_all()
        self._stream.close()
        with self._arrived:
            self._ended = True
            self._arrived.notify_all()

    def wait_for(self, wanted: Callable[[str], bool], *, timeout_s: float = TIMEOUT_S, first: int = 0) -> str:
        """The first line that is ``wanted``, from line ``first`` on; an AssertionError with the log when none comes."""
        deadline = time.monotonic() + timeout_s
        seen = first
        with self._arrived:
            while True:
                for line in self.lines[seen:]:
                    if wanted(line):
                        return line
                seen = len(self.lines)
                left_s = deadline - time.monotonic()
                assert not self._ended, "the log ended:\n" + "\n".join(self.lines)
                assert left_s > 0, "no such line in time:\n" + "\n".join(self.lines)
                self._arrived.wait(left_s)

    def records(self, first: int = 0) -> list[dict[str, Any]]:
        """The lines that are JSON records, so far, from line ``first`` on."""
        with self._arrived:
            lines = self.lines[first:]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def join(self) -> None:
        self._reader.join(TIMEOUT_S)
        assert not self._reader.is_alive(), "somebody still holds the log open"


class Daemon:
    """A running `weightcached serve`. Made by :func:`daemon` and :func:`scripted_daemon`."""

    def __init__(
        self, process: subprocess.Popen[str], place: Place, model_dir: Path, options: Mapping[str, Any]
    ) -> None:
        self.process = process
        self.place = place
        self.model_dir = model_dir
        self.options = options
        self.log = Log(process.stderr)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_logged(self, message: str, *, first: int = 0, **fields: object) -> dict[str, Any]:
        """Wait for a log record with this message and these fields, from line ``first`` of the log on."""

        def wanted(line: str) -> bool:
            record = json.loads(line) if line.startswith("{") else {}
            return record.get("message") == message and all(record.get(key) == value for key, value in fields.items())

        record: dict[str, Any] = json.loads(self.log.wait_for(wanted, first=first))
        return record

    def connect(self) -> Channel:
        """A connection to its socket, which is there as soon as the daemon listens. The caller closes it."""
        self.wait_logged("listening")
        return connect(self.place)

    def report(self) -> Report:
        """Its own account of itself."""
        channel = self.connect()
        try:
            message = ask(channel, Status())
        finally:
            channel.close()
        assert isinstance(message, Report), message
        return message

    def wait_until(self, state: str) -> Report:
        """Wait until it logs that it is in ``state``, then ask it."""
        self.wait_logged("state", state=state)
        return self.report()

    def hello(self, **changes: Any) -> Hello:
        """A valid Hello for this daemon: its options, its checkpoint, receipts as a client takes them."""
        return hello_for(self.model_dir, **{**self.options, **changes})

    def attach(self, channel: Channel | None = None, **changes: Any) -> tuple[Grant, OwnedFds]:
        """Ask until granted, with a digest where receipts are not enough (those of files just written are not).

        The caller closes the descriptors. Without a ``channel`` the lease ends at once.
        """
        used = channel or self.connect()
        try:
            frame = converse(used, self.hello(**changes))
            if isinstance(frame.message, Unproven):
                frame = converse(used, self.hello(digest=digest_of(self.model_dir), **changes))
        finally:
            if channel is None:
                used.close()
        assert isinstance(frame.message, Grant), frame.message
        return frame.message, frame.fds

    def kill_keeper(self, number: int = signal.SIGKILL) -> int:
        """Send a signal to the keeper that answers now: under a supervisor, not what was started. Returns its pid."""
        pid = self.report().pid
        os.kill(pid, number)
        return pid

    def wait_ready_again(self, first: int) -> Report:
        """Wait until a keeper says, from line ``first`` of the log on, that it is ready; its report."""
        self.wait_logged("state", state="ready", first=first)
        return self.report()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(TIMEOUT_S)
        self.log.join()
        return status


def connect(place: Place) -> Channel:
    """A connection to whoever listens at ``place``. Raises OSError as connect does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(place.socket_path))
    except BaseException:
        connection.close()
        raise
    return Channel(connection, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)


def ask(channel: Channel, message: Message, *, timeout_s: float = TIMEOUT_S) -> Message:
    """Send, and receive the next frame, which must carry no descriptor."""
    deadline = Deadline.after(timeout_s)
    with suppress(PeerClosed):  # it may have refused us unasked: what it said is still to be read
        channel.send(message, deadline=deadline)
    frame = channel.receive(deadline=deadline)
    with frame.fds:
        assert len(frame.fds) == 0
    return frame.message


def converse(channel: Channel, message: Message, *, timeout_s: float = TIMEOUT_S) -> Frame:
    """Send, and receive frames until one that is an answer and not Loading."""
    deadline = Deadline.after(timeout_s)
    channel.send(message, deadline=deadline)
    while isinstance((frame := channel.receive(deadline=deadline)).message, Loading | Event):
        frame.fds.close()
    return frame


def digest_of(model_dir: Path) -> str:
    """The checkpoint's content digest, computed here."""
    with open_weights(weight_files(model_dir)) as weights:
        return content_digest(weights)


def hello_for(
    model_dir: Path,
    *,
    layout: str = "hf",
    tp_size: int = 1,
    tp_rank: int = 0,
    dtype: str = "auto",
    quantization: str = "none",
    **changes: Any,
) -> Hello:
    """What a client of this release would say for ``model_dir``. ``changes`` replace fields of the message."""
    config = build_config(
        model_dir, layout=layout, tp_size=tp_size, tp_rank=tp_rank, dtype=dtype, quantization=quantization
    )
    with open_weights(weight_files(model_dir)) as weights:
        receipts = take_receipts(weights)
    fields: dict[str, Any] = {
        "client_version": "0.0",
        "name": "test",
        "pid": os.getpid(),
        "config": abbreviated(config.entries()),
        "fingerprint": config.fingerprint,
        "receipts": receipts.sha256,
        "receipts_trusted": receipts.trusted,
        "digest": None,
        "want": "checkpoint",
        "wait_s": TIMEOUT_S,
    }
    return Hello(**{**fields, **changes})


def arguments_for(
    model: str | Path,
    runtime_dir: Path,
    *,
    name: str = "default",
    layout: str = "hf",
    tp_size: int = 1,
    tp_rank: int = 0,
    dtype: str = "auto",
    quantization: str = "none",
    **ranks: object,
) -> list[str]:
    """Arguments of `weightcached serve`, with the digest cache beside the sockets and logs as JSON. ``ranks`` are those
    of stages and experts.
    """
    arguments = ["serve", "--model", str(model), "--runtime-dir", str(runtime_dir), "--name", name]
    arguments += ["--layout", layout, "--tp-size", str(tp_size), "--tp-rank", str(tp_rank), "--dtype", dtype]
    arguments += ["--quantization", quantization, "--cache-dir", str(runtime_dir / "digests"), "--log-format", "json"]
    for option, value in ranks.items():
        arguments += [f"--{option.replace('_', '-')}", str(value)]
    return arguments


def start(
    model_dir: Path,
    runtime_dir: Path,
    *extra: str,
    command: Sequence[str] = REAL,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    name: str = "default",
    **options: Any,
) -> Daemon:
    """Start a daemon and return at once. The caller stops it. ``extra`` are further arguments of `serve`."""
    ranks = {"tp_size": 1, "tp_rank": 0} | {key: options[key] for key in options if key.endswith(("_size", "_rank"))}
    place = Place(runtime_dir, name, host_device(**ranks))
    process = subprocess.Popen(
        [*command, *arguments_for(model_dir, runtime_dir, name=name, **options), *extra],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )
    return Daemon(process, place, model_dir, options)


@contextmanager
def daemon(model_dir: Path, runtime_dir: Path, *extra: str, **options: Any) -> Iterator[Daemon]:
    """A daemon that loads ``model_dir`` with the real loader. Stopped at the end if it still runs; exit status 0."""
    yield from _running(start(model_dir, runtime_dir, *extra, **options))


@contextmanager
def scripted_daemon(
    model_dir: Path,
    runtime_dir: Path,
    *extra: str,
    script: Mapping[str, Any] | None = None,
    breaking: str = "",
    group: Path | None = None,
    **options: Any,
) -> Iterator[Daemon]:
    """A daemon whose worker follows ``script`` (`scripted_worker.py`). Stopped at the end as by :func:`daemon`.

    ``breaking`` names a function that connection handlers call (or ``examine``, that adoption calls), and that will
    raise ZeroDivisionError. ``group`` is a cgroup that the daemon joins first.
    """
    environment = {**scripted_environment(runtime_dir, script), "WEIGHTCACHED_TEST_BREAKS": breaking}
    if group is not None:
        environment["WEIGHTCACHED_TEST_CGROUP"] = str(group)
    yield from _running(start(model_dir, runtime_dir, *extra, command=SCRIPTED, environment=environment, **options))


@contextmanager
def supervised_daemon(
    model_dir: Path,
    runtime_dir: Path,
    *extra: str,
    script: Mapping[str, Any] | None = None,
    supervise: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Daemon]:
    """A supervisor with a keeper whose worker follows ``script``, or is the real one for ``None``. Stopped at the end
    if it still runs; exit status 0. ``supervise`` are options of `weightcached supervise`. The process and the log are
    the supervisor's; in the log are all its keepers.
    """
    supervisor = [*REAL, "supervise", "--log-format", "json"]
    supervisor += ["--backoff-max", "0", *supervise, "--"]
    command = supervisor if script is None else [*supervisor, *SCRIPTED]
    given = {**scripted_environment(runtime_dir, script), **(environment or {})}
    yield from _running(start(model_dir, runtime_dir, *extra, command=command, environment=given, **options))


def scripted_environment(runtime_dir: Path, script: Mapping[str, Any] | None) -> dict[str, str]:
    """What :data:`SCRIPTED` needs in its environment."""
    return {
        # Where the scripted worker is found, before what a test has put there.
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "WEIGHTCACHED_TEST_WORKER": json.dumps(script or {}),
        "WEIGHTCACHED_TEST_MODULES": str(modules_file(runtime_dir)),
    }


def modules_file(runtime_dir: Path) -> Path:
    """Where a scripted daemon writes the names of all modules it had imported by its end."""
    return runtime_dir.parent / "modules"


def _running(started: Daemon) -> Iterator[Daemon]:
    try:
        yield started
    except BaseException:
        started.stop(signal.SIGKILL)
        raise
    killed = started.process.poll() is not None
    status = started.stop()
    assert killed or status == 0, "\n".join(started.log.lines)
