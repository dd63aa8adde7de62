"""`weightcached engine --device cuda`, as processes, on the driver that needs no GPU: where torch would make a tensor
of a GPU's memory it makes one of the fake's, and the engine computes with that.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import TIMEOUT_S
from tests.support.fakecuda import FakeCuda
from tests.support.gpu_daemons import gpu_daemon, place_of
from tests.support.gpu_engine import command
from tests.support.unprivileged import ROOT
from weightcached.client.engine import command as engine_command
from weightcached.client.engine import model as engine_model
from weightcached.client.engine.generate import Decoder
from weightcached.client.engine.options import EngineOptions, parse, serve_command
from weightcached.protocol.memory.chosen import chosen

PROMPT = "What memcached is to objects,"
UUID = "8f3c21ab-0000-4000-8000-000000000001"


def run(fake: FakeCuda, model: Path, runtime_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    asked = ["engine", "--model", model, "--runtime-dir", runtime_dir, "--prompt", PROMPT, "--max-new-tokens", 12]
    environment = {**fake.whole_environment, "PYTHONPATH": str(ROOT), "WEIGHTCACHED_CACHE_DIR": str(runtime_dir / "d")}
    return subprocess.run(
        command(*asked, "--json", *words), env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def answered(fake: FakeCuda, model: Path, runtime_dir: Path, *words: str) -> dict[str, Any]:
    ended = run(fake, model, runtime_dir, *words)
    assert ended.returncode == 0, ended.stderr
    said: dict[str, Any] = json.loads(ended.stdout)
    return said


def tokens_from_disk(checkpoint: Path) -> list[int]:
    config, tokenizer = engine_model.read_config_and_tokenizer(checkpoint)
    recipe = engine_model.Recipe(checkpoint, config, tokenizer, engine_model.import_model_class(config))
    module = engine_model.load(recipe, None, dtype="auto")
    return list(Decoder(recipe, module).generate(PROMPT, max_new_tokens=12).token_ids)


@pytest.mark.slow
@pytest.mark.timeout(300)  # each start of an engine imports Transformers
def test_from_a_gpu_come_the_tokens_that_come_from_disk(fake_cuda: FakeCuda, tiny: Path, runtime_dir: Path) -> None:
    wanted = tokens_from_disk(tiny)
    with gpu_daemon(fake_cuda, tiny, runtime_dir) as served:
        report = served.wait_until("ready")
        said = answered(fake_cuda, tiny, runtime_dir, "--device", "cuda", "--weight-cache-mode", "require")
        assert said["weights"]["source"] == "daemon"
        assert said["weights"]["generation"] == report.generation
        assert said["weights"]["resident_bytes"] == report.resident_nbytes == fake_cuda.used_nbytes()
        assert said["answer"]["token_ids"] == wanted
    owner = answered(fake_cuda, tiny, runtime_dir, "--device", "cuda", "--weight-cache-mode", "daemon")
    assert (owner["weights"]["source"], owner["answer"]["token_ids"]) == ("daemon", wanted)
    assert not place_of(fake_cuda.devices[0], runtime_dir).socket_path.exists()
    assert fake_cuda.used_nbytes() == 0
    assert fake_cuda.leaks() == {}


def test_a_gpu_that_is_not_seen_is_a_deployments_error(fake_cuda: FakeCuda, tiny: Path, runtime_dir: Path) -> None:
    ended = run(fake_cuda, tiny, runtime_dir, "--device", "cuda:3")
    assert ended.returncode == 3
    assert "device_absent" in ended.stderr


def test_the_owned_daemon_is_told_the_gpu_by_its_uuid() -> None:
    options = parse(["--model", "m", "--prompt", "x", "--device", f"cuda:{UUID}", "--memory", "cuda-vmm"])
    words = serve_command(options, "/models/m")
    assert words[words.index("--device") + 1] == f"cuda:{UUID}"
    assert words[words.index("--memory") + 1] == "cuda-vmm"
    assert engine_command._place(options, chosen(options.device, options.memory)).device == f"gpu-{UUID}"
    assert "--device" not in serve_command(EngineOptions(model="m"), "/models/m")
