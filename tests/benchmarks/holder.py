"""(h) The process whose memory weights of kind ``cuda-ipc`` are is killed, or its keeper is: how long until an engine
that reads them has ended.

Real processes with the project's own code, on the driver that needs no GPU (tests/fakecuda): a GPU's own work at the
end of a process is not in it. Measured from the kill to the engine's end as the kernel tells it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.outcome import MIB, Outcome, Samples, Settings, Table, Target, milliseconds
from tests.benchmarks.workspace import Workspace
from tests.support.fakecuda import FakeCuda, FakeDevice, build, fake_cuda_in_memory
from weightcached.client.holder import HOLDER_LOST_EXIT
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.cuda_ipc import CudaIpc

BOUND_S = 1.0
THREADS = 4
HELD_NBYTES = 256 * MIB
WAYS = (("holder", 0), ("holder", THREADS), ("keeper", 0), ("keeper", THREADS))
"""Who is killed, and how many threads of the engine compute meanwhile."""


def run(settings: Settings, workspace: Workspace) -> Outcome:
    kills = 5 if settings.quick else 4 * settings.rounds
    folder = workspace.directory / "fakecuda"
    folder.mkdir()
    libraries = build(folder)
    measured = {way: Samples(tuple(_kill(libraries, *way) for _ in range(kills))) for way in WAYS}
    worst_s = max(samples.high for samples in measured.values())
    target = Target(
        f"an engine has ended {BOUND_S:g} s after its holder or keeper was killed (the longest of all)",
        f"{milliseconds(worst_s)} ms",
        worst_s <= BOUND_S,
    )
    figures = {" ".join(map(str, key)): list(samples.seconds) for key, samples in measured.items()}
    return Outcome("holder", [_table(measured, kills)], [target], figures)


def _kill(libraries: Path, victim: str, threads: int) -> float:
    device = FakeDevice(nbytes=2 * HELD_NBYTES)
    with fake_cuda_in_memory(libraries, [device]) as fake, OwnedFds() as fds, ExitStack() as held:
        kind = CudaIpc(device.uuid)
        fds.append(kind.allocate(HELD_NBYTES, name="benchmark"))
        arguments = [device.uuid, str(HELD_NBYTES), str(fds[0])]
        keeper = held.enter_context(_process(fake, "keeper", arguments, [fds[0]]))
        fds.append(os.pidfd_open(int(_word(keeper))))
        kind.seal(fds[0])
        fds.append(kind.export(fds[0]))
        arguments = [device.uuid, str(HELD_NBYTES), str(fds[2]), str(fds[1]), str(threads)]
        engine = held.enter_context(_process(fake, "engine", arguments, [fds[1], fds[2]]))
        _word(engine)
        fds.append(os.pidfd_open(engine.pid))
        began_s = time.monotonic()
        if victim == "keeper":
            keeper.kill()
        else:
            signal.pidfd_send_signal(fds[1], signal.SIGKILL)
        select.select([fds[3]], [], [])
        seconds = time.monotonic() - began_s
        if engine.wait() != HOLDER_LOST_EXIT:
            raise RuntimeError(f"the engine ended with {engine.returncode}")
        return seconds


def _process(fake: FakeCuda, role: str, arguments: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"tests.benchmarks.holding.{role}", *arguments]
    return subprocess.Popen(command, env=fake.whole_environment, stdout=subprocess.PIPE, pass_fds=fds)


def _word(process: subprocess.Popen[bytes]) -> bytes:
    line = process.stdout.readline() if process.stdout is not None else b""
    if not line:
        raise RuntimeError(f"a process ended with {process.wait()}")
    return line


def _table(measured: dict[tuple[str, int], Samples], kills: int) -> Table:
    rows = [
        (
            victim,
            f"{threads} threads of Python" if threads else "waits",
            *map(milliseconds, (samples.median, samples.low, samples.high)),
        )
        for (victim, threads), samples in measured.items()
    ]
    return Table(
        f"kill -9 → the end of an engine that reads the memory ({kills} kills each)",
        ("killed", "the engine", "median ms", "lowest", "highest"),
        tuple(rows),
        ("the driver is not a real one: what a GPU's driver does at the end of a process comes on top",),
    )
