"""The whole life of weights on a GPU, each part of it killed: memory stays while somebody has it, then none is left.

On the driver that needs no GPU; test_gpu.py has what a part does when it is told, this what its death does to others.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from tests.support.daemons import TIMEOUT_S
from tests.support.fakecuda import FakeCuda
from tests.support.gpu_daemons import gpu_daemon
from tests.support.gpu_engine import gpu_engine

pytestmark = pytest.mark.timeout(600)  # a story has several starts


def test_a_life_of_deaths(fake_cuda: FakeCuda, model: Path, runtime_dir: Path) -> None:
    """An engine is killed; the keeper is, and an engine resumes its lease, sleeps over another death, and is right."""
    with gpu_daemon(fake_cuda, model, runtime_dir, supervised=True) as served:
        first = served.wait_until("ready")

        def all_is_well() -> None:
            assert fake_cuda.used_nbytes() == first.resident_nbytes
            assert fake_cuda.leaks() == {}

        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda", heartbeat_s=0.2) as staying:
            staying.answer()
            wanted = staying.ask("digests")
            assert staying.ask("differing") == []
            with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as killed:
                killed.answer()
                assert served.report().lease_count == 2
                os.kill(killed.pid, signal.SIGKILL)
                killed.process.wait(TIMEOUT_S)
            all_is_well()
            for asleep in (False, True):
                addresses = staying.ask("addresses")
                if asleep:
                    staying.ask("unmap")
                seen = len(served.log.lines)
                served.kill_keeper()
                again = served.wait_ready_again(seen)
                assert (again.generation, again.bytes_read) == (first.generation, 0)
                staying.ask("wait_for_its_lease")
                assert served.report().lease_count == 1
                if asleep:
                    all_is_well()
                    staying.ask("remap")
                assert staying.ask("addresses") == addresses
                assert staying.ask("digests") == wanted
                all_is_well()
    assert fake_cuda.used_nbytes() == 0
    assert fake_cuda.leaks() == {}


def test_whoever_keeps_the_vault_dies_and_engines_alone_keep_the_memory(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    """With the supervisor its keeper dies, and with both what is kept for engines that come later."""
    with gpu_daemon(fake_cuda, model, runtime_dir, supervised=True) as served:
        report = served.wait_until("ready")
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine:
            engine.answer()
            wanted = engine.ask("digests")
            keeper = os.pidfd_open(report.pid)
            os.kill(served.pid, signal.SIGKILL)
            served.process.wait(TIMEOUT_S)
            ended, _, _ = select.select([keeper], [], [], TIMEOUT_S)
            assert ended
            assert engine.ask("digests") == wanted
            assert fake_cuda.used_nbytes() == report.resident_nbytes
            os.close(keeper)
    assert fake_cuda.used_nbytes() == 0
    assert fake_cuda.leaks() == {}
