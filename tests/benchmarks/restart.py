"""(e) A keeper is killed under its supervisor: how long until the next one serves the same weights, of any size.

Measured from `kill -9` to a grant in the hands of a client that connected while nobody was there to answer it: the
listening socket outlives the keeper, so the client waits instead of being refused.
"""

from __future__ import annotations

import os
import select
import signal
import time

from tests.benchmarks import checkpoints
from tests.benchmarks.daemon import Daemon, serving
from tests.benchmarks.machine import require_memory
from tests.benchmarks.outcome import GIB, Outcome, Samples, Settings, Table, Target, milliseconds, size
from tests.benchmarks.workspace import Workspace
from tests.support.daemons import ask, connect, converse, hello_for
from weightcached.protocol.messages import Grant, Hello, Report, Status
from weightcached.protocol.places import Place, host_device

GOAL_S = 0.5
_PAUSE_S = 1.0


def run(settings: Settings, workspace: Workspace) -> Outcome:
    sizes = [GIB // 10, GIB if settings.quick else 8 * GIB]
    kills = 3 if settings.quick else 4 * settings.rounds
    require_memory(2 * max(sizes), what="restart")
    measured = {nbytes: _measure(nbytes, kills, workspace) for nbytes in sizes}
    worst_s = max(waits.median for waits, _ in measured.values())
    target = Target(
        f"kill -9 of the keeper to a grant by the next one: at most {GOAL_S:g} s (median), whatever the size",
        f"{milliseconds(worst_s)} ms",
        worst_s <= GOAL_S,
    )
    figures = {
        str(nbytes): {"seconds": waits.seconds, "processor_s": processor.seconds}
        for nbytes, (waits, processor) in measured.items()
    }
    return Outcome("restart", [_table(measured, kills)], [target], figures)


def _measure(nbytes: int, kills: int, workspace: Workspace) -> tuple[Samples, Samples]:
    """Seconds from kill to grant, and of processor time that the next keeper had used by then."""
    written = checkpoints.many_tensors(workspace.directory / f"restart-{nbytes}", count=1000, nbytes=nbytes)
    name = f"restart-{nbytes}"
    waits, processor = [], []
    with serving(workspace, written.directory, name=name, supervised=True) as daemon:
        place = Place(daemon.runtime_dir, name, host_device(tp_size=1, tp_rank=0))
        hello = hello_for(written.directory, digest=daemon.report["digest"])
        for _ in range(kills):
            time.sleep(_PAUSE_S)  # what the last keeper still did in the background is not what is measured
            wait_s, processor_s = _kill(place, hello, daemon)
            waits.append(wait_s)
            processor.append(processor_s)
    workspace.remove(written.directory)
    return Samples(tuple(waits)), Samples(tuple(processor))


def _kill(place: Place, hello: Hello, daemon: Daemon) -> tuple[float, float]:
    pid = _keeper_pid(place)
    pidfd = os.pidfd_open(pid)
    began_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [])  # dead: nobody can take the connection that now follows
    os.close(pidfd)
    channel = connect(place)
    try:
        with (frame := converse(channel, hello)).fds:
            wait_s = time.monotonic() - began_s
            if not isinstance(frame.message, Grant) or frame.message.generation != daemon.report["generation"]:
                raise RuntimeError(f"not the same weights: {frame.message}")
    finally:
        channel.close()
    return wait_s, _processor_s(_keeper_pid(place))


def _keeper_pid(place: Place) -> int:
    channel = connect(place)
    try:
        report = ask(channel, Status())
    finally:
        channel.close()
    if not isinstance(report, Report):
        raise RuntimeError(f"no report: {report}")
    return report.pid


def _processor_s(pid: int) -> float:
    """User and system time of a process, to a hundredth of a second."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        after_name = file.read().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def _table(measured: dict[int, tuple[Samples, Samples]], kills: int) -> Table:
    rows = [
        (size(nbytes), *map(milliseconds, (waits.median, waits.low, waits.high, processor.median)))
        for nbytes, (waits, processor) in measured.items()
    ]
    return Table(
        f"kill -9 of the keeper → a grant by the next one ({kills} kills each)",
        ("weights", "median ms", "lowest", "highest", "processor ms"),
        tuple(rows),
        (
            "nothing is loaded or read again; the path is never absent and no client is refused",
            "processor: what the next keeper used until it answered, start of the interpreter and imports included",
        ),
    )
