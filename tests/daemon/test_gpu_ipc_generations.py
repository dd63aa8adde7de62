"""Several generations of kind ``cuda-ipc``: each has a holder of its own, and what the end of each means.

Real daemons, workers and engines, on the driver that needs no GPU. What one generation promises is test_gpu_ipc.py's.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.commanding import Changer, from_directory, other_weights, standings
from tests.support.daemons import Daemon
from tests.support.fakecuda import FakeCuda
from tests.support.gpu_daemons import IPC, IPC_ENGINE, digests_from_disk, gpu_daemon
from tests.support.gpu_engine import gpu_engine
from tests.support.plain import tensors_of
from tests.support.staging import await_change, begin_push, decide, finish, push_all, push_begun
from weightcached.client import HOLDER_LOST_EXIT
from weightcached.protocol.control import FromHeld
from weightcached.protocol.errors import UpdateConflict


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    return other_weights(model, tmp_path / "other")


@pytest.fixture
def served(fake_cuda: FakeCuda, model: Path, runtime_dir: Path) -> Iterator[Daemon]:
    with gpu_daemon(fake_cuda, model, runtime_dir, *IPC) as running:
        running.wait_until("ready")
        yield running


def holders(fake: FakeCuda) -> set[int]:
    """The processes whose memory generations are."""
    return {one.pid for one in fake.memory()}


def test_an_update_is_another_holders_and_the_previous_one_goes_when_nobody_needs_it(
    served: Daemon, fake_cuda: FakeCuda, model: Path, other: Path, runtime_dir: Path
) -> None:
    before = holders(fake_cuda)
    with gpu_engine(fake_cuda, model, runtime_dir, **IPC_ENGINE) as reading:
        reading.answer()
        after = Changer(served).update(from_directory(other), keep_previous=0)
        assert [standing for _, standing in standings(after)] == ["current", "previous"]
        assert len(holders(fake_cuda)) == 2
        assert reading.ask("digests") == digests_from_disk(model)
        with gpu_engine(fake_cuda, other, runtime_dir, **IPC_ENGINE) as late:
            assert late.answer()["generation"] == after.current
            assert late.ask("digests") == digests_from_disk(other)
    served.wait_logged("generation dropped", reason="nobody needs it")
    assert len(holders(fake_cuda) - before) == 1
    assert not holders(fake_cuda) & before  # its memory is the device's again: whoever asks for room finds it
    Changer(served).update(from_directory(model), keep_previous=1)
    assert len(holders(fake_cuda)) == 2
    assert served.stop() == 0
    assert fake_cuda.memory() == []
    assert fake_cuda.leaks() == {}


def test_the_death_of_a_previous_ones_holder_takes_that_one_alone(
    served: Daemon, fake_cuda: FakeCuda, model: Path, other: Path, runtime_dir: Path
) -> None:
    changer, [first] = Changer(served), holders(fake_cuda)
    version = served.report().version
    assert version is not None
    with (
        gpu_engine(fake_cuda, model, runtime_dir, **IPC_ENGINE) as reads_previous,
        gpu_engine(fake_cuda, other, runtime_dir, **IPC_ENGINE, want="current") as reads_current,
    ):
        reads_previous.answer()
        reads_current.answer()  # of the same holder, so far
        after = changer.update(from_directory(other), keep_previous=1)
        with gpu_engine(fake_cuda, other, runtime_dir, **IPC_ENGINE) as reads_new:
            reads_new.answer()
            os.kill(first, signal.SIGKILL)
            assert reads_previous.process.wait(20) == HOLDER_LOST_EXIT
            assert reads_current.process.wait(20) == HOLDER_LOST_EXIT
            dropped = served.wait_logged("generation dropped")
            assert f"pid {first}: killed by SIGKILL" in dropped["reason"]
            assert standings(changer.state()) == [(after.current, "current")]
            assert reads_new.ask("digests") == digests_from_disk(other)
            _, gone = changer.prepare(FromHeld(version=version))
            assert gone.change is not None
            assert (gone.change.state, gone.change.error_code) == ("failed", "generation_gone")
            [last] = holders(fake_cuda)
            os.kill(last, signal.SIGKILL)
            assert reads_new.process.wait(20) == HOLDER_LOST_EXIT
        assert served.process.wait(60) == 1


def test_the_death_of_a_prepared_ones_holder_fails_its_change(served: Daemon, fake_cuda: FakeCuda, other: Path) -> None:
    changer, serving = Changer(served), holders(fake_cuda)
    current = changer.current()
    transaction, prepared = changer.prepare(from_directory(other))
    assert [standing for _, standing in standings(prepared)] == ["current", "prepared"]
    [staying] = holders(fake_cuda) - serving
    os.kill(staying, signal.SIGKILL)
    served.wait_logged("generation dropped")
    state = changer.state()
    assert standings(state) == [(current, "current")]
    assert state.change is not None
    assert (state.change.state, state.change.error_code) == ("failed", "holder_died")
    with pytest.raises(UpdateConflict):
        changer.decide(transaction, commit=True)
    assert changer.decide(transaction, commit=False).outcome == "aborted"
    assert holders(fake_cuda) == serving
    assert len(changer.update(from_directory(other)).generations) == 2


def test_a_pushed_generation_has_a_holder(served: Daemon, fake_cuda: FakeCuda, model: Path, runtime_dir: Path) -> None:
    serving = holders(fake_cuda)
    trained = {name: (tensor.float() + 1).to(tensor.dtype) for name, tensor in tensors_of(model).items()}
    transaction = begin_push(served)
    with push_begun(served, transaction) as push:
        push_all(push, trained)
        finish(push)
        assert await_change(served, transaction).state == "prepared"
        decide(served, transaction, commit=True)
    [pushed] = holders(fake_cuda) - serving
    with gpu_engine(fake_cuda, model, runtime_dir, **IPC_ENGINE, want="current") as engine:
        engine.answer()
        digests = engine.ask("digests")
        for name, tensor in trained.items():
            assert digests[name] == hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        os.kill(pushed, signal.SIGKILL)
        assert engine.process.wait(20) == HOLDER_LOST_EXIT
    assert served.process.wait(60) == 1
