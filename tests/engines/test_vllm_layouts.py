"""Layouts that vLLM itself makes, in the daemon's worker: an engine shares what its kernels would make anew."""

from __future__ import annotations

import json

import pytest

from tests.engines.cases import CASES
from tests.engines.engine import PYTHON, EngineError
from tests.engines.generating import of_vllm, said_by, said_without_cache, started, with_cache
from tests.support import daemons

pytestmark = pytest.mark.timeout(600)  # a daemon's vLLM is imported twice: for the key, and in the worker

STORED = {case.name: case for case in CASES}
OF_VLLM = (str(PYTHON), "-P", "-m", "weightcached.daemon")


@pytest.fixture
def serve(tmp_path):
    """Call it with a model and a stage; a daemon of its own for each, ready. All are stopped at the end."""
    running = []

    def of(model, stage):
        arguments = ("--engine", "vllm", "--", "--max-model-len", "64", "--weight-cache-stage", stage)
        daemon = daemons.start(model, tmp_path / "run", *arguments, command=OF_VLLM)
        running.append(daemon)
        daemon.log.wait_for(
            lambda line: line.startswith("{") and json.loads(line).get("state") in ("ready", "failed"), timeout_s=300
        )
        assert daemon.report().state == "ready", daemon.report().last_error
        return tmp_path / "run"

    yield of
    for daemon in running:
        daemon.stop()


@pytest.mark.parametrize("name", ["mixtral", "llama-tied"])
def test_post_processed_weights_are_shared_experts_and_all(generator, checkpoint, serve, name):
    model = checkpoint(STORED[name])
    _, expected = said_by(generator, of_vllm(model))
    runtime_dir = serve(model, "after")
    arguments = with_cache(model, runtime_dir, options={"layout": "vllm", "stage": "after"})
    (worker,), tokens = said_by(generator, arguments)
    assert tokens == expected
    assert worker["report"]["source"] == "daemon"
    assert (worker["elsewhere"], worker["private_nbytes"]) == ([], 0)
    assert worker["tied"] == ([["lm_head.weight", "model.embed_tokens.weight"]] if name == "llama-tied" else [])
    with pytest.raises(EngineError, match=r"engine\.stage") as caught:
        started(generator, with_cache(model, runtime_dir, options={"layout": "vllm", "stage": "before"}))
    assert caught.value.code == "config_mismatch"


@pytest.mark.parametrize(("name", "part"), [("llama-awq", "qweight"), ("llama-int8-channel", "proj.weight")])
def test_weights_of_before_are_post_processed_by_the_engine(generator, checkpoint, serve, name, part):
    model = checkpoint(STORED[name])
    expected = said_without_cache(generator, model)
    runtime_dir = serve(model, "before")
    (worker,), tokens = said_by(generator, with_cache(model, runtime_dir, options={"layout": "vllm"}))
    assert tokens == expected
    assert any(part in parameter for parameter in worker["report"]["made_anew"]), worker["report"]["made_anew"]
    assert worker["private_nbytes"] == 0
