"""Weights on a GPU are changed under an engine: pushed where a shard lies in several segments, and swapped in; loaded
where there is no room, where the driver fails, and where the keeper dies afterwards.

On the driver that needs no GPU. The worker is the real one, the trainer is in this process.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemon.test_staging import push_and_finish
from tests.support.checkpoints import tiny_llama
from tests.support.commanding import Changer, other_weights
from tests.support.fakecuda import CONTEXT_NBYTES, GRANULARITY, UNKNOWN, FakeCuda, FakeDevice
from tests.support.gpu_daemons import digests_from_disk, gpu_daemon
from tests.support.gpu_engine import gpu_engine
from tests.support.groups import kill_and_wait
from tests.support.plain import tensors_of
from tests.support.staging import await_change, begin_push, decide, push_begun
from weightcached.client.control import rollback, update
from weightcached.protocol.errors import DeviceFailed, InsufficientMemory
from weightcached.protocol.memory.cuda import physical


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_what_is_pushed_is_swapped_in_at_the_same_addresses(
    fake_cuda: FakeCuda, runtime_dir: Path, tmp_path: Path
) -> None:
    """All of it, and then a part of it on top."""
    model = tiny_llama(tmp_path / "model", hidden_size=256, vocab_size=2048, intermediate_size=1024)
    limit: dict[str, Any] = {physical.LARGEST_VARIABLE: str(GRANULARITY)}
    first, tensors = digests_from_disk(model), tensors_of(model)
    all_new = {name: (tensor.float() + 1).to(tensor.dtype) for name, tensor in tensors.items()}
    part = {name: (tensor.float() + 2).to(tensor.dtype) for name, tensor in tensors.items() if ".1." in name}
    with gpu_daemon(fake_cuda, model, runtime_dir, **limit) as served:
        before = served.wait_until("ready")
        assert len(fake_cuda.memory()) > 2
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda", want="current") as engine:
            engine.answer()
            assert engine.ask("digests") == first
            addresses, expected = engine.ask("addresses"), first
            for pushed, partial in ((all_new, False), (part, True)):
                transaction = begin_push(served, partial=partial)
                with push_begun(served, transaction) as push:
                    version = push_and_finish(push, pushed)
                    assert await_change(served, transaction).state == "prepared"
                    decided = decide(served, transaction, commit=True)
                assert decided.version == version
                had = engine.ask("swap")
                assert (had["version"], had["resident_bytes"]) == (version, before.resident_nbytes)
                expected = {**expected, **{name: digest(tensor) for name, tensor in pushed.items()}}
                assert engine.ask("digests") == expected
                assert engine.ask("differing") == []
                assert engine.ask("addresses") == addresses
    assert fake_cuda.used_nbytes() == 0
    assert fake_cuda.leaks() == {}


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    return other_weights(model, tmp_path / "other")


def test_an_update_that_a_gpu_has_no_room_for_says_so_and_what_is_merely_kept_makes_room(
    fake_cuda: FakeCuda, model: Path, other: Path, runtime_dir: Path
) -> None:
    """A worker's context takes room, too."""
    for generations, fits in ((1, False), (2, True)):
        fake_cuda.plug(FakeDevice(nbytes=CONTEXT_NBYTES + generations * GRANULARITY + GRANULARITY // 2))
        with gpu_daemon(fake_cuda, model, runtime_dir) as served:
            first = served.wait_until("ready")
            if fits:
                update(other, runtime_dir=runtime_dir)
                second = served.report().generation
                update(model, runtime_dir=runtime_dir)
                held = Changer(served).state().generations
                assert [one.generation for one in held if one.standing == "previous"] == [second]
            else:
                with pytest.raises(InsufficientMemory, match=r"MiB free.*beside 1 generation") as raised:
                    update(other, runtime_dir=runtime_dir)
                assert "not changed on rank tp0of1" in str(raised.value)
                assert served.report().generation == first.generation
            assert fake_cuda.used_nbytes() == generations * GRANULARITY
            with gpu_engine(fake_cuda, model, runtime_dir, device="cuda", want="current") as engine:
                engine.answer()
                assert engine.ask("digests") == digests_from_disk(model)
    assert fake_cuda.leaks() == {}


def test_a_driver_that_fails_during_an_update_costs_nothing_that_is_served(
    fake_cuda: FakeCuda, model: Path, other: Path, runtime_dir: Path
) -> None:
    """In the keeper, the worker or the process that verifies; and once it is well again the update goes through."""
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        first = served.wait_until("ready")
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda", want="current") as engine:
            engine.answer()
            wanted = engine.ask("digests")
            for call in (
                "cuMemCreate",
                "cuMemExportToShareableHandle",
                "cuMemImportFromShareableHandle",
                "cuMemcpyHtoDAsync",
                "cuMemcpyDtoHAsync",
            ):
                failed = call
                if call.startswith("cuMemcpy"):  # the process ends with that
                    fake_cuda.lose(call)
                    failed = f"({call}|cuCtxGetCurrent)"  # another thread may meet it first, about to make an event
                else:
                    fake_cuda.fail((call, "*", UNKNOWN))
                with pytest.raises(DeviceFailed, match=f"not changed on rank tp0of1: {failed} failed") as raised:
                    update(other, runtime_dir=runtime_dir)
                assert fake_cuda.devices[0].uuid in str(raised.value)
                fake_cuda.found()
                fake_cuda.fail()
                assert (served.report().generation, served.report().state) == (first.generation, "ready")
                assert fake_cuda.used_nbytes() == first.resident_nbytes
            fake_cuda.fail(("cuMemRelease", "*", UNKNOWN))
            with pytest.raises(DeviceFailed, match="not changed on rank tp0of1: cuMemRelease failed"):
                update(other, runtime_dir=runtime_dir)
            change = Changer(served).state().change
            assert change is not None
            assert "cuMemRelease failed" in str(change.error)
            assert fake_cuda.used_nbytes() == 2 * first.resident_nbytes  # until it is taken back, it is held for nobody
            fake_cuda.fail()
            update(other, runtime_dir=runtime_dir)
            assert fake_cuda.used_nbytes() == 2 * first.resident_nbytes
            assert engine.ask("digests") == wanted
            engine.ask("swap")
            assert engine.ask("digests") == digests_from_disk(other)
    assert fake_cuda.leaks() == {}


def test_a_keeper_that_is_killed_after_an_update_has_both_generations_again(
    fake_cuda: FakeCuda, model: Path, other: Path, runtime_dir: Path
) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir, supervised=True) as served:
        first = served.wait_until("ready")
        update(other, runtime_dir=runtime_dir)
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda", want="current", heartbeat_s=0.2) as engine:
            engine.answer()
            addresses = engine.ask("addresses")
            kill_and_wait(served)
            engine.ask("wait_for_its_lease")
            assert served.report().bytes_read == 0
            assert rollback(runtime_dir=runtime_dir).away == ()
            assert served.report().generation == first.generation
            engine.ask("swap")
            assert engine.ask("digests") == digests_from_disk(model)
            assert engine.ask("addresses") == addresses
            assert fake_cuda.used_nbytes() == 2 * first.resident_nbytes
    assert fake_cuda.leaks() == {}
