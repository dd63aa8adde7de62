"""Layouts that engines make, on a GPU: built in the worker, copied there, attached to. On the driver without a GPU."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemon.test_engine_made import PACKED, attached
from tests.support.checkpoints import tiny_llama
from tests.support.fakecuda import INVALID_VALUE, OUT_OF_MEMORY, CudaHere, FakeDevice
from tests.support.gpu_daemons import gpu_daemon
from tests.support.gpu_engine import host_tensor
from weightcached.client import attach, segments
from weightcached.client.transformers.loading import made_by_transformers
from weightcached.daemon import cli


@pytest.fixture(autouse=True)
def _tensors_of_the_fake(cuda_here: CudaHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "device_tensor", host_tensor)


def test_what_an_engine_made_is_on_the_gpu_what_it_is_in_host_memory(
    cuda_here: CudaHere,
    toy: Path,
    runtime_dir: Path,
    site: Path,
) -> None:
    from toy_engine.cached import bound
    from toy_engine.engine import Options, load

    own = load(toy, Options.parse(["--packing", "4"]), rank=0, size=1)
    with gpu_daemon(cuda_here.fake, toy, runtime_dir, *PACKED, supervised=True) as served:
        report = served.wait_until("ready")
        assert (report.layout, report.memory) == ("toy", "cuda-vmm")
        assert cuda_here.fake.used_nbytes() == report.resident_nbytes
        with attached(served, "--packing", "4", device="cuda") as weights:
            assert weights["head.weight"] is weights["embed.weight"]
            for name, tensor in {**dict(own.named_parameters()), **dict(own.named_buffers())}.items():
                assert torch.equal(weights[name], tensor)
                assert weights[name].stride() == tensor.stride()
            assert weights.differing() == []
            model = bound(weights, toy, ["--packing", "4"])
            tokens = torch.tensor([1, 2, 3])
            assert torch.equal(model(tokens), own(tokens))
            del model
        seen = len(served.log.lines)
        served.kill_keeper()
        again = served.wait_ready_again(seen)
        assert (again.generation, again.bytes_read) == (report.generation, 0)
        gc.collect()
        assert cuda_here.fake.used_nbytes() == report.resident_nbytes
    assert cuda_here.fake.used_nbytes() == 0


def test_snapshot_and_verify_of_it(
    cuda_here: CudaHere,
    toy: Path,
    runtime_dir: Path,
    site: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--runtime-dir", str(runtime_dir), "--device", "cuda", "--json", *PACKED]
    saved = ["snapshot", "save", str(toy), str(tmp_path / "saved"), "--cache-dir", str(tmp_path / "digests")]
    with gpu_daemon(cuda_here.fake, toy, runtime_dir, *PACKED) as served:
        report = served.wait_until("ready")
        assert cli.main(["verify", str(toy), *words]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"][0]["generation"] == report.generation
        assert cli.main([*saved, *words]) == 0
    with gpu_daemon(cuda_here.fake, toy, runtime_dir, "--snapshot", str(tmp_path / "saved"), *PACKED) as served:
        again = served.wait_until("ready")
        assert again.resident_nbytes == report.resident_nbytes
        with attached(served, "--packing", "4", device="cuda") as weights:
            assert weights.differing() == []


@pytest.mark.parametrize(("call", "result"), [("cuMemHostAlloc", OUT_OF_MEMORY), ("cuMemcpyHtoDAsync", INVALID_VALUE)])
def test_a_copy_that_fails_is_the_loads_error_and_leaves_nothing(
    cuda_here: CudaHere,
    toy: Path,
    runtime_dir: Path,
    site: Path,
    call: str,
    result: int,
) -> None:
    cuda_here.fake.fail((call, "*", result))
    with gpu_daemon(cuda_here.fake, toy, runtime_dir, *PACKED) as served:
        if result == OUT_OF_MEMORY:
            served.wait_logged("loading again")
            cuda_here.fake.fail()
            report = served.wait_until("ready")
            assert cuda_here.fake.used_nbytes() == report.resident_nbytes
        else:
            assert call in str(served.wait_until("failed").last_error)
            assert cuda_here.fake.used_nbytes() == 0
    cuda_here.fake.fail()


def test_a_gpu_without_room_for_the_copy_is_said_before_it_is_made(
    cuda_here: CudaHere,
    toy: Path,
    runtime_dir: Path,
    site: Path,
) -> None:
    cuda_here.fake.plug(FakeDevice(nbytes=1 << 20))
    with gpu_daemon(cuda_here.fake, toy, runtime_dir, *PACKED) as served:
        assert "MiB free; held by" in str(served.wait_until("failed").last_error)


def test_the_state_that_transformers_makes_is_bound_to_on_a_gpu(
    cuda_here: CudaHere, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tiny_llama(tmp_path / "model")
    monkeypatch.setenv("WEIGHTCACHED_CACHE_DIR", str(runtime_dir / "digests"))
    where: dict[str, Any] = {"runtime_dir": runtime_dir, "mode": "require", "device": "cuda"}
    with gpu_daemon(cuda_here.fake, model_dir, runtime_dir, "--engine", "transformers") as served:
        report = served.wait_until("ready")
        device = f"gpu-{cuda_here.fake.devices[0].uuid}"
        with (
            attach(model_dir, **where, **made_by_transformers(model_dir, device=device)) as weights,
            attach(model_dir, mode="off") as from_disk,
        ):
            assert weights.resident_bytes == report.resident_nbytes
            assert {name for name in weights if not torch.equal(weights[name], from_disk[name])} == set()
