"""Rows about who is killed: a keeper under an engine's computation, a keeper beside whom nobody is left but the vault,
and whoever holds memory that dies with him.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.faults.chaos import processes
from tests.gpu import listing
from tests.gpu.engine import engine
from tests.gpu.filling import decoder
from tests.gpu.products import Products
from tests.gpu.row import Row, Setting, Skipped, line_of, require
from tests.gpu.serving import attached, running_daemon
from tests.support.daemons import Daemon
from weightcached.client import HOLDER_LOST_EXIT
from weightcached.daemon.worker_process import WORKER_MODULE
from weightcached.protocol.memory.cuda import nvml
from weightcached.protocol.messages import Report

SETTLES_S = 10.0
KILLS = 3
BOUND_S = 1.0
"""What protocol/memory/README.md says."""


def outlives_its_keeper(setting: Setting) -> str:
    """kill -9 of the keeper under products that were launched before, go on, and are done after its death: every one
    is right, the restarted keeper adopts, and a later engine is given the same.
    """
    import torch

    products_each = 2 if setting.rehearsal else 50
    model = decoder(setting)
    before = nvml.memory(setting.uuid).used_nbytes
    with running_daemon(setting, model, supervised=True) as served:
        report = served.report()
        require(report.memory == "cuda-vmm", f"memory kind {report.memory}, not cuda-vmm")
        beyond = _used_beyond(setting, before, report)
        said = listing.without_context(setting, report.pid, who="the keeper")
        with attached(setting, model, served.place.runtime_dir) as weights:
            with Products(max(weights.values(), key=torch.Tensor.numel)) as products:
                products.wait_for(products_each)
                seen = len(served.log.lines)
                with _to_be_killed(report.pid) as kill:
                    under_way = products.under_way()
                    started_s = time.perf_counter()
                    kill()
                    straddled = sum(not product.done for product in under_way)
                require(straddled > 0, f"none of {len(under_way)} products outlasted the keeper: this shows nothing")
                again = served.wait_ready_again(seen)
                seconds = time.perf_counter() - started_s
                products.wait_for(products_each)
            finished = products.finished
            _same(again, report)
            with attached(setting, model, served.place.runtime_dir) as late:
                require(late.generation == weights.generation, "an engine that came later has another generation")
                require(late.differing() == [], f"rows differ from their digests: {late.differing()[:3]}")
    return (
        f"{finished} products right, {straddled} of them launched before the keeper's death and done after it; adopted "
        f"after {seconds:.2f} s with no byte read, every row has its digest; used beyond the {report.resident_nbytes} "
        f"bytes of weights: {beyond}; {said}"
    )


def vault_alone(setting: Setting) -> str:
    """Engines have gone, the keeper is killed, and the vault, which is stopped, cannot start another: its descriptors
    are all that is left of the weights. Then it goes on, and the next keeper has them.
    """
    mark = uuid.uuid4().hex
    model = decoder(setting)
    before, listed = nvml.memory(setting.uuid).used_nbytes, nvml.holders(setting.uuid)
    with running_daemon(setting, model, supervised=True, environment={processes.MARK: mark}) as served:
        first = served.report()
        _seen_right(setting, served)
        seen = len(served.log.lines)
        with _to_be_killed(first.pid) as kill, _stopped(served):
            kill()
            others = _settled(lambda: len(processes.marked(mark) - {served.pid}), at_most=0)
            require(others == 0, f"{others} processes are left beside the vault")
            beyond = _used_beyond(setting, before, first)
            came = {holder.pid for holder in nvml.holders(setting.uuid)} - {holder.pid for holder in listed}
            require(not came, f"processes that NVML lists and did not before: {came}")
            require(processes.marked(mark) == {served.pid}, "another process came while the memory was looked at")
        _same(served.wait_ready_again(seen), first)
        _seen_right(setting, served)
    return (
        f"{first.resident_nbytes + beyond} bytes used, of {first.resident_nbytes} of weights, with no process but the "
        "vault; adopted from it with no byte read, and every row has its digest"
    )


def stopped_in_time(setting: Setting) -> str:
    """kill -9 of whoever holds weights of kind ``cuda-ipc`` while engines compute with them: they end as they should,
    before the bound, and the supervised daemon loads anew.
    """
    model = decoder(setting)
    seconds = []
    with running_daemon(setting, model, supervised=True, memory="cuda-ipc") as served:
        for _ in range(1 if setting.rehearsal else KILLS):
            first = served.report()
            holder = _holder_of(first.pid)
            with engine("compute", setting, model, served.place.runtime_dir, memory="cuda-ipc") as computing:
                require(line_of(computing) == "same", "rows differ from their digests")
                seen = len(served.log.lines)
                ended = os.pidfd_open(computing.pid)
                started_s = time.perf_counter()
                os.kill(holder, signal.SIGKILL)
                select.select([ended], [], [], SETTLES_S)
                seconds.append(time.perf_counter() - started_s)
                os.close(ended)
                require(computing.poll() == HOLDER_LOST_EXIT, f"the engine's status is {computing.returncode}")
            again = served.wait_ready_again(seen)
            require(again.generation != first.generation, "the daemon serves what is gone")
    figures = f"{len(seconds)} kills: median {statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s"
    return setting.judged([figures], {f"{BOUND_S:g} s at most": max(seconds) <= BOUND_S})


def _holder_of(keeper: int) -> int:
    """The one process that the keeper has started to hold weights. Never by NVML's list: its pids may be those of
    another PID namespace, and mean a stranger here. Skipped where the kernel does not tell a process's children.
    """
    workers = [pid for pid in processes.children(keeper) if WORKER_MODULE in processes.command(pid).split()]
    if len(workers) != 1:
        raise Skipped(f"of the keeper's children {len(workers)} hold weights, as far as /proc tells: nobody is killed")
    return workers[0]


def _seen_right(setting: Setting, served: Daemon) -> None:
    """By an engine of its own process, of which nothing is left: its context would count as memory in use."""
    with engine("check", setting, served.model_dir, served.place.runtime_dir, memory="cuda-vmm") as checking:
        require(line_of(checking) == "same", "rows differ from their digests")
        checking.communicate()
        require(checking.returncode == 0, f"the engine's status is {checking.returncode}")


def _used_beyond(setting: Setting, before: int, report: Report) -> int:
    """Bytes of the device that are used beside the weights, more or less what a driver keeps for itself; AssertionError
    where more is used, or less than the weights take.
    """
    beyond = _settled(
        lambda: nvml.memory(setting.uuid).used_nbytes - before - report.resident_nbytes, at_most=setting.spare_nbytes
    )
    require(beyond >= -setting.spare_nbytes, f"{-beyond} of {report.resident_nbytes} bytes of the weights are gone")
    require(beyond <= setting.spare_nbytes, f"{beyond} bytes are used beyond the weights")
    return beyond


def _same(again: Report, before: Report) -> None:
    require(again.generation == before.generation, "the restarted keeper serves another generation")
    require(again.bytes_read == 0, f"the restarted keeper read {again.bytes_read} bytes anew")


@contextmanager
def _to_be_killed(pid: int) -> Iterator[Callable[[], None]]:
    """What kills that very process, and returns when it is dead."""
    process = os.pidfd_open(pid)

    def kill() -> None:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        dead, _, _ = select.select([process], [], [], SETTLES_S)
        require(bool(dead), f"process {pid} lives {SETTLES_S:.0f} s after kill -9")

    try:
        yield kill
    finally:
        os.close(process)


@contextmanager
def _stopped(served: Daemon) -> Iterator[None]:
    """The supervisor does nothing meanwhile. It has what it has."""
    served.process.send_signal(signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, served.pid, os.WSTOPPED)
        yield
    finally:
        served.process.send_signal(signal.SIGCONT)


def _settled(measure: Callable[[], int], *, at_most: int) -> int:
    """``measure()`` once it is ``at_most`` that, or what it is after a while: a process that ended takes some time to
    be gone.
    """
    until_s = time.monotonic() + SETTLES_S
    while (found := measure()) > at_most and time.monotonic() < until_s:
        time.sleep(0.05)
    return found


ROWS = (
    Row("kept", "weights outlive their keeper, and a computation does not notice", outlives_its_keeper, 90),
    Row("vault", "descriptors in the vault alone keep the weights", vault_alone, 90),
    Row("holder", "who reads memory whose holder is killed is stopped in time", stopped_in_time, 120),
)
