"""The whole life of weights on a GPU, each part of it killed: memory stays while somebody has it, then none is left.

On the driver that needs no GPU; test_gpu.py has what a part does when it is told, this what its death does to others.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import TIMEOUT_S
from tests.support.fakecuda import GRANULARITY, UNKNOWN, FakeCuda
from tests.support.gpu_daemons import gpu_daemon
from tests.support.gpu_engine import gpu_engine
from weightcached.protocol.memory.cuda import physical

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


@pytest.mark.parametrize(
    ("call", "nth", "memory"),
    [("cuMemMap", 1, "cuda-vmm"), ("cuMemcpyHtoDAsync", 3, "cuda-vmm"), ("cuMemcpyHtoDAsync", 3, "cuda-ipc")],
)
def test_a_gpu_that_is_lost_while_it_is_filled_fails_the_load_by_name_and_a_restart_finds_it_again(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, call: str, nth: int, memory: str
) -> None:
    """Everything fails from then on, what gives memory back too: the first failure is the one that is told."""
    [device] = fake_cuda.devices
    fake_cuda.lose(call, nth)
    with gpu_daemon(fake_cuda, model, runtime_dir, "--memory", memory) as served:
        said = str(served.wait_until("failed").last_error)
        assert f"{call} failed" in said
        assert device.uuid in said
        assert "next step: look for the device" in said
        assert (fake_cuda.memory(), fake_cuda.contexts()) == ([], [])
        with gpu_engine(fake_cuda, model, runtime_dir, device=f"cuda:{device.uuid}", memory=memory) as engine:
            assert engine.error()["code"] == "daemon_failed"
    fake_cuda.found()
    with gpu_daemon(fake_cuda, model, runtime_dir, "--memory", memory) as served:
        report = served.wait_until("ready")
        assert fake_cuda.used_nbytes() == report.resident_nbytes


def test_an_engine_whose_gpu_refuses_its_sleep_or_wake_or_is_lost_has_all_weights_or_is_told(
    fake_cuda: FakeCuda, large_model: Path, runtime_dir: Path
) -> None:
    """Of several segments the second one fails: what was done to the first is undone, or it is said."""
    limit: dict[str, Any] = {physical.LARGEST_VARIABLE: str(GRANULARITY)}
    with gpu_daemon(fake_cuda, large_model, runtime_dir, **limit) as served:
        report = served.wait_until("ready")
        with gpu_engine(fake_cuda, large_model, runtime_dir, device="cuda", heartbeat_s=0.2) as engine:
            engine.answer()
            wanted, addresses = engine.ask("digests"), engine.ask("addresses")

            def refused(word: str, said: str, *calls: str) -> None:
                """``word`` meets a driver that refuses the second of the first of ``calls``, and any of the others."""
                nth = fake_cuda.calls(engine.pid).count(calls[0]) + 2
                fake_cuda.fail((calls[0], nth, UNKNOWN), *((call, "*", UNKNOWN) for call in calls[1:]))
                with pytest.raises(AssertionError, match=f"DeviceFailed: {said}"):
                    engine.ask(word)
                fake_cuda.fail()

            refused("unmap", "cuMemUnmap failed", "cuMemUnmap")
            assert engine.ask("digests") == wanted
            refused("unmap", "a segment cannot be unmapped.* cannot be mapped again", "cuMemUnmap", "cuMemMap")
            engine.ask("remap")
            assert engine.ask("digests") == wanted
            engine.ask("unmap")
            refused("remap", "cuMemMap failed", "cuMemMap")
            engine.ask("remap")
            assert (engine.ask("digests"), engine.ask("addresses")) == (wanted, addresses)
            engine.ask("unmap")
            fake_cuda.lose("cuMemMap")
            for _ in range(2):
                with pytest.raises(AssertionError, match=f"cuMemMap failed.*{report.place[-8:]}.*next step: look for"):
                    engine.ask("remap")
            with gpu_engine(fake_cuda, large_model, runtime_dir, device="cuda") as late:
                error = late.error()
                assert (error["code"], "cuInit failed" in str(error)) == ("device_failed", True)
            fake_cuda.found()
            with gpu_engine(fake_cuda, large_model, runtime_dir, device="cuda") as late:
                late.answer()
                assert late.ask("digests") == wanted
            assert fake_cuda.used_nbytes() == report.resident_nbytes
    assert fake_cuda.used_nbytes() == 0
