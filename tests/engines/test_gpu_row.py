"""What the row `vllm` of tests/gpu starts, by real vLLM on a CPU with weights in host memory: what it asks vLLM for is
there, in the arguments that it takes, and the report is one. What a GPU makes of it, no test here shows.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engine import PYTHON
from tests.gpu.vllm_tokens import SERVED, TOKENS
from tests.support.checkpoints import tiny_llama
from tests.support.daemons import daemon
from tests.support.unprivileged import ROOT

pytestmark = pytest.mark.timeout(300)


def said(*arguments: object) -> dict[str, Any]:
    """As the row has it said, by the Python that has vLLM."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / ".typing")])}
    command = [str(PYTHON), "-P", "-m", "tests.gpu.vllm_tokens", *map(str, arguments)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=200)
    assert ended.returncode == 0
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def test_tokens_come_from_disk_and_from_the_cache_with_a_report(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", hidden_size=256, head_dim=64, intermediate_size=512, vocab_size=4096)
    from_disk = said(model, "off")
    assert len(from_disk["tokens"]) == TOKENS
    assert from_disk["report"] is None
    with daemon(model, tmp_path / "run", **SERVED) as served:
        served.wait_until("ready")
        from_cache = said(model, "require", tmp_path / "run")
    assert len(from_cache["tokens"]) == TOKENS
    assert from_cache["report"]["nbytes_shared"] > 0
    assert from_cache["report"]["made_anew"] == 0
