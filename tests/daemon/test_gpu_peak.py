"""How much of a GPU is taken while a real daemon loads, at the most: what protocol/memory/README.md states.

The driver that needs no GPU keeps the most that there was at any time, so nothing is sampled that could be missed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support import expert_models
from tests.support.fakecuda import CONTEXT_NBYTES, FakeCuda
from tests.support.gpu_daemons import IPC, gpu_daemon
from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.strategy import THREADS
from weightcached.protocol.config import build_config

PLAIN = [
    ("straight", {}, ()),
    ("strided", {"layout": "fused", "tp_size": 2, "tp_rank": 1}, ()),
    ("strided", {"layout": "fused", "tp_size": 2, "tp_rank": 1}, IPC),
    ("transposed", {"layout": "fused"}, ()),
    ("cast by the host", {"layout": "fused", "dtype": "float32"}, ()),
    ("quantized by the host", {"layout": "fused", "quantization": "int4=8"}, ()),
]


@pytest.fixture(scope="module")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its matrices lie transposed in the files."""
    directory = tmp_path_factory.mktemp("experts")
    return expert_models.write(directory, expert_models.config_of("gpt_oss", num_hidden_layers=1))


def words(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize(("how", "options", "extra"), PLAIN)
def test_a_load_takes_the_shard_and_one_context_whatever_is_done_with_the_bytes_on_the_host(
    fake_cuda: FakeCuda,
    large_model: Path,
    experts_model: Path,
    runtime_dir: Path,
    how: str,
    options: dict[str, Any],
    extra: tuple[str, ...],
) -> None:
    model = experts_model if how == "transposed" else large_model
    with gpu_daemon(fake_cuda, model, runtime_dir, *words(options), *extra) as served:
        report = served.wait_until("ready")
        assert fake_cuda.peak_nbytes() == report.resident_nbytes + CONTEXT_NBYTES


@pytest.mark.parametrize("quantization", ["fp8", "int4=8"])
def test_a_gpu_that_computes_takes_the_values_of_a_slab_of_each_thread_and_the_same_as_float32(
    fake_cuda: FakeCuda, large_model: Path, experts_model: Path, runtime_dir: Path, quantization: str
) -> None:
    """Here a slab is a whole matrix: none is larger than a slab may be, or it lies transposed and is never cut.
    What small slabs take grows by doubling.
    """
    options: dict[str, Any] = {"layout": "fused", "quantization": quantization}
    for model in (large_model, experts_model):
        config = build_config(model, tp_size=1, tp_rank=0, **options)
        with open_checkpoint(model) as checkpoint:
            planned = [one.parameter for one in pipeline.prepare(checkpoint, config).placement.placed]
        largest = max(math.prod(one.source_shape[-2:]) for one in planned if one.transform is not None)
        with gpu_daemon(fake_cuda, model, runtime_dir, *words(options), computes=True) as served:
            report = served.wait_until("ready")
            beside = fake_cuda.peak_nbytes() - report.resident_nbytes - CONTEXT_NBYTES
            assert largest * (2 + 4) <= beside < 2 * THREADS * largest * (2 + 4)
            assert fake_cuda.used_nbytes() == report.resident_nbytes
        fake_cuda.peak_nbytes()
