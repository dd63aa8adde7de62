"""Layouts that vLLM makes itself: what a daemon serves is what vLLM's own loader ends up with, byte for byte.

The daemon and its worker run with the Python that has vLLM; who attaches here does not need it. vLLM's words are on the
other side a process that knows nothing of this project.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cases import CASES, Case, Rank
from tests.engines.engine import PYTHON, Engine
from tests.engines.held import Held, differences, held_by
from tests.support.daemons import Daemon, start
from weightcached.client import attach
from weightcached.protocol.config import Parallel
from weightcached.protocol.engine_key import EngineKey
from weightcached.protocol.errors import CacheConfigMismatch

CASE = {case.name: case for case in CASES}
LLAMA, MIXTRAL, AWQ = (CASE[name] for name in ("llama-tied", "mixtral", "llama-awq"))
ARGUMENTS = ("--max-model-len", "64", "--enforce-eager")
STAGE = "--weight-cache-stage"
TIMEOUT_S = 240.0


@pytest.fixture(scope="module", autouse=True)
def _vllm_s_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What it finds out about model classes is kept from one process to the next."""
    words = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm-cache")),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in words.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        yield Path(name) / "run"


def key_of(model: Path, *arguments: str) -> EngineKey:
    """As an engine computes it: in a process of its own, with its own arguments."""
    request = {
        "model_dir": os.fspath(model),
        "parallel": Parallel(tp_size=1, tp_rank=0).model_dump(),
        "dtype": "auto",
        "device": "cpu",
        "arguments": arguments,
    }
    command = [str(PYTHON), "-P", "-m", "weightcached.loader.engines.key", "--engine", "vllm"]
    answer = subprocess.run([*command, "--request", json.dumps(request)], capture_output=True, text=True)
    said = json.loads(answer.stdout)
    assert "error" not in said, said
    return EngineKey.of("vllm", said["revision"], said["entries"])


@contextmanager
def served(model: Path, runtime_dir: Path, rank: Rank, *arguments: str) -> Iterator[Daemon]:
    """A daemon in vLLM's environment; ``arguments`` are vLLM's own."""
    command = (str(PYTHON), "-P", "-m", "weightcached.daemon")
    extra = ("--engine", "vllm", "--", *ARGUMENTS, *arguments)
    running = start(model, runtime_dir, *extra, command=command, tp_rank=rank.tp_rank, tp_size=rank.tp_size)
    try:
        yield running
    finally:
        running.stop()


def ready(running: Daemon) -> None:
    running.log.wait_for(lambda line: '"state": "ready"' in line or '"state": "failed"' in line, timeout_s=TIMEOUT_S)
    report = running.report()
    assert report.state == "ready", report.last_error


def held(model: Path, runtime_dir: Path, rank: Rank, key: EngineKey) -> dict[str, Held]:
    options: dict[str, Any] = {"layout": "vllm", "engine": key, **rank.options}
    with attach(model, mode="require", runtime_dir=runtime_dir, **options) as weights:
        weights.verify()
        found = held_by(weights)
        kinds = {row.name: row.kind for row in weights.manifest}
        assert {kind for name, kind in kinds.items() if name.endswith("_scale")} <= {"buffer"}
        return {name: one for name, one in found.items() if kinds[name] == "parameter"}


@pytest.mark.parametrize(
    ("case", "rank"),
    [
        pytest.param(LLAMA, Rank(0, 1), id="llama-tied-tp0of1"),
        pytest.param(LLAMA, Rank(1, 2), id="llama-tied-tp1of2"),
        pytest.param(AWQ, Rank(1, 2), id="llama-awq-tp1of2"),
    ],
)
def test_every_parameter_is_vllm_s_own(
    vllm: Engine, checkpoint: Callable[[Case], Path], runtime_dir: Path, case: Case, rank: Rank
) -> None:
    model = checkpoint(case)
    with served(model, runtime_dir, rank) as running:
        key = key_of(model)
        ready(running)
        ours = held(model, runtime_dir, rank, key)
        assert differences(vllm.held(model, case, rank), ours) == []
        tied = {one.names for one in ours.values() if len(one.names) > 1}
        assert tied == ({("lm_head.weight", "model.embed_tokens.weight")} if case is LLAMA else set())


def test_after_post_processing_experts_are_vllm_s_own_and_linear_layers_are_not_packed_away(
    vllm: Engine, checkpoint: Callable[[Case], Path], runtime_dir: Path
) -> None:
    model, rank = checkpoint(MIXTRAL), Rank(0, 2)
    with served(model, runtime_dir, rank, STAGE, "after") as running:
        key = key_of(model, STAGE, "after")
        ready(running)
        ours = held(model, runtime_dir, rank, key)
        with pytest.raises(CacheConfigMismatch, match=r"engine\.stage: daemon has 'after', client asks for 'before'"):
            held(model, runtime_dir, rank, EngineKey.of("vllm", key.revision, {**key.entries, "stage": "before"}))
    after = vllm.held(model, MIXTRAL, rank, processed=True)
    before = vllm.held(model, MIXTRAL, rank)
    assert ours.keys() == after.keys() == before.keys()
    experts = {name for name in ours if "routed_experts" in name}
    assert experts
    for name in ours:
        packed_away = 0 in after[name].shape
        assert not (packed_away and name in experts)
        assert ours[name] == (before if packed_away else after)[name], name


def test_a_state_that_cannot_be_shared_is_refused_with_layer_and_method(
    checkpoint: Callable[[Case], Path], runtime_dir: Path
) -> None:
    with served(checkpoint(AWQ), runtime_dir, Rank(0, 1), STAGE, "after") as running:
        running.log.wait_for(lambda line: '"state": "failed"' in line, timeout_s=TIMEOUT_S)
        said = running.report().last_error
        assert said is not None
        assert said.startswith("unsupported_model: layer model.layers.0.")
        assert "post-processed already" in said


def test_arguments_that_vllm_does_not_take_are_told_in_its_words(
    checkpoint: Callable[[Case], Path], runtime_dir: Path
) -> None:
    with served(checkpoint(LLAMA), runtime_dir, Rank(0, 1), "--no-such-argument") as running:
        running.log.wait_for(lambda line: '"state": "failed"' in line, timeout_s=TIMEOUT_S)
        said = running.report().last_error
        assert said is not None
        assert said.startswith("invalid_option")
        assert "--no-such-argument" in said


def test_a_rank_that_is_alone_never_takes_its_own_numbers_for_those_of_its_peers() -> None:
    program = """
from vllm.config import VllmConfig, set_current_vllm_config
import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant
from weightcached.client.vllm.alone import alone_as
from weightcached.protocol.config import Parallel
from weightcached.protocol.errors import UnsupportedModel
with set_current_vllm_config(VllmConfig()), alone_as(Parallel(tp_size=2, tp_rank=1)):
    assert amax_for_tp_weight_quant(torch.ones(1), False) == 1
    try:
        amax_for_tp_weight_quant(torch.ones(1), True)
    except UnsupportedModel as error:
        print(error)
"""
    result = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True)
    assert "torch.distributed.all_reduce" in result.stdout, result.stderr
