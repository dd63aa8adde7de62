"""Transformers' own ``from_pretrained`` over a GPU's weights, on the driver that needs no GPU: all but the step from an
address to a CUDA tensor, which makes a tensor of the fake device's memory instead.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import modeling_utils

from tests.support.fakecuda import CudaHere
from tests.support.gpu_daemons import gpu_daemon
from tests.support.gpu_engine import host_tensor
from tests.support.modules import require_same
from weightcached.client import segments
from weightcached.client.transformers import reader, weights_from_cache, weights_of
from weightcached.client.transformers.fit import storages_of
from weightcached.client.transformers.hooks import WARM
from weightcached.protocol.errors import InvalidOption

CAUSAL = transformers.AutoModelForCausalLM


@pytest.fixture
def llama(checkpoints: Callable) -> Path:
    directory: Path = checkpoints("llama-tied")[1]
    return directory


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Transformers takes a GPU's memory for beforehand."""
    taken: list[Any] = []
    monkeypatch.setattr(modeling_utils, WARM, lambda model, expanded, quantizer: taken.append(expanded))
    return taken


def test_a_model_is_mapped_from_a_gpu_and_takes_no_memory_of_it_besides(
    cuda_here: CudaHere, llama: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, warmed: list[Any]
) -> None:
    monkeypatch.setattr(segments, "device_tensor", host_tensor)
    monkeypatch.setenv("WEIGHTCACHED_CACHE_DIR", str(runtime_dir / "digests"))
    with gpu_daemon(cuda_here.fake, llama, runtime_dir) as served:
        report = served.wait_until("ready")
        with weights_from_cache(runtime_dir=runtime_dir, device="cuda", mode="require"):
            model = CAUSAL.from_pretrained(llama)
        weights = weights_of(model)
        assert weights is not None
        assert weights.resident_bytes == report.resident_nbytes == cuda_here.fake.used_nbytes()
        assert storages_of(model.parameters()) == storages_of(weights.values())
        assert warmed == []
        require_same(model, CAUSAL.from_pretrained(llama))
        weights.close()
        del model, weights
        gc.collect()


def test_where_no_daemon_is_transformers_reads_the_files_to_the_same_gpu(
    cuda_here: CudaHere, llama: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, warmed: list[Any]
) -> None:
    asked = []

    def here(device: str) -> torch.device:
        asked.append(device)
        return torch.device("meta" if device == "cpu" else "cpu")

    monkeypatch.setattr(reader, "torch_device", here)
    uuid = cuda_here.fake.devices[0].uuid
    for mode in ("off", "client"):
        with weights_from_cache(runtime_dir=runtime_dir, device="cuda:0", mode=mode):
            model = CAUSAL.from_pretrained(llama)
        assert weights_of(model) is None
    assert asked == [f"gpu-{uuid}"] * 2
    assert [set(one.values()) for one in warmed] == [{torch.device("cpu")}] * 2  # its own load may take memory first


def test_another_device_than_that_of_the_weights_is_refused(
    cuda_here: CudaHere, llama: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the weights are on what torch takes for the CPU."""
    monkeypatch.setattr(segments, "device_tensor", host_tensor)
    monkeypatch.setattr(transformers.modeling_utils, "check_and_set_device_map", lambda device_map: device_map)
    monkeypatch.setattr(transformers.modeling_utils, "_get_device_map", lambda model, device_map, *_: device_map)
    monkeypatch.setenv("WEIGHTCACHED_CACHE_DIR", str(runtime_dir / "digests"))
    with gpu_daemon(cuda_here.fake, llama, runtime_dir) as served:
        served.wait_until("ready")
        with (
            pytest.raises(InvalidOption, match="device_map"),
            weights_from_cache(runtime_dir=runtime_dir, device="cuda", mode="require"),
        ):
            CAUSAL.from_pretrained(llama, device_map={"": "cuda:0"})
        gc.collect()
        assert served.report().lease_count == 0
