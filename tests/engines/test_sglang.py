"""SGLang's loading code with the loaders of our page on it: what the page says was seen.

One process of SGLang answers everything (`sglang_loader.py`); it is started once.
"""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines import checkpoints
from tests.engines.cases import CASES, Case, Rank
from tests.engines.held import Held, differences
from tests.support.daemons import daemon
from tests.support.unprivileged import ROOT

PYTHON = ROOT / ".venv-sglang/bin/python"
PAGE = ROOT / "client/sglang/README.md"
TEXT = PAGE.read_text()
NAMES = ("llama", "llama-tied", "qwen2", "qwen3", "phi3", "gemma2")
RANKS = (Rank(0, 1), Rank(1, 2))
Answers = dict[tuple[str, Rank, str], dict[str, Any]]


def case_of(name: str) -> Case:
    """A case of ours; published Gemma 2 says what SGLang asks for, Transformers leaves it out."""
    (case,) = [case for case in CASES if case.name == name]
    more = {"hidden_act": "gelu_pytorch_tanh"} if name == "gemma2" else {}
    return replace(case, config={**case.config, **more})


def example() -> str:
    (found,) = re.findall(r"^<!-- example: weightcached_sglang -->\n```python\n(.*?)^```$", TEXT, re.M | re.S)
    return str(found)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Answers]:
    """What SGLang's code says of itself, and what it holds of each model at each rank, loaded in each way."""
    if not PYTHON.exists():
        pytest.fail(f"there is no {PYTHON}: run `make test-engines`, which makes it")
    folder = tmp_path_factory.mktemp("sglang")
    page = folder / "weightcached_sglang.py"
    page.write_text(example())
    asked: dict[tuple[str, Rank, str], dict[str, Any]] = {}
    with ExitStack() as daemons:
        for name in NAMES:
            model, run = checkpoints.write(case_of(name), folder / name), folder / "run"
            common = {"runtime_dir": str(run), "cache_dir": str(run / "digests"), "wait_for_daemon_s": 60}
            daemons.enter_context(daemon(model, run, name=f"{name}-hf")).wait_until("ready")
            for rank in RANKS:
                options = case_of(name).options_at(rank)
                place = f"{name}-{rank.tp_size}"
                daemons.enter_context(daemon(model, run, name=place, **options)).wait_until("ready")
                request = {"model": str(model), "tp": (rank.tp_rank, rank.tp_size)}
                asked[name, rank, "own"] = {**request, "options": None}
                asked[name, rank, "mapped"] = {**request, "options": {"name": place, **common}}
                asked[name, rank, "copied"] = {**request, "options": {"name": f"{name}-hf", "copy": True, **common}}
                asked[name, rank, "again"] = {**request, "options": None, "again": {"name": f"{name}-hf", **common}}
        done = subprocess.run(
            [PYTHON, ROOT / "tests/engines/sglang_loader.py"],
            input=json.dumps({"page": str(page), "held": list(asked.values())}),
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    facts, *answers = json.loads(done.stdout)
    return facts, dict(zip(asked, answers, strict=True))


def held(answer: dict[str, Any]) -> dict[str, Held]:
    assert "error" not in answer, answer["error"]
    return {
        name: Held(found["dtype"], tuple(found["shape"]), found["sha256"], tuple(found["names"]))
        for name, found in answer["parameters"].items()
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", RANKS, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("way", "loader"), [("mapped", "MappedLoader"), ("copied", "CopyingLoader"), ("again", "DefaultModelLoader")]
)
def test_each_parameter_is_that_of_sglangs_own_loader(
    answered: tuple[dict[str, Any], Answers], name: str, rank: Rank, way: str, loader: str
) -> None:
    own, ours = answered[1][name, rank, "own"], answered[1][name, rank, way]
    if (name, way) == ("gemma2", "mapped"):
        assert "norm.gemma_weight: a buffer on the meta device that the weights do not have" in ours["error"]
        return
    assert differences(held(own), held(ours)) == []
    assert (own["loader"], ours["loader"]) == ("DefaultModelLoader", loader)
    assert own["parameters"]
    assert not ours["on_meta"]
    assert ours["private_nbytes"] == 0
    assert (ours["preloaded_nbytes"] > 0) == (way == "mapped")


@pytest.mark.timeout(600)
def test_another_model_s_weights_are_seen_to_differ(answered: tuple[dict[str, Any], Answers]) -> None:
    """The comparison can fail."""
    one, other = (held(answered[1][name, Rank(0, 1), "mapped"]) for name in ("llama", "qwen2"))
    assert {difference.what for difference in differences(one, other)} == {"name"}


@pytest.mark.timeout(600)
def test_sglangs_own_cache_is_as_the_page_says(answered: tuple[dict[str, Any], Answers]) -> None:
    facts = answered[0]
    assert facts["modes"] == ["off", "daemon", "client"]
    assert "requires a CUDA-alike platform" in facts["refusal"]
    assert "weightcached" in facts["without_the_plugin"]
    assert facts["largest_message_nbytes"] == 256 << 20
    assert facts["quantizations"] == ["", "fp8"]
    assert f"within {facts['watchdog_s']:g} s" in TEXT
    assert {"model_path", "revision", "torch_version", "device_capability", "quant_config_hash"} <= set(facts["key"])
    assert not any("digest" in field or "content" in field for field in facts["key"])


def test_the_page_is_about_the_release_that_is_installed() -> None:
    (version,) = re.findall(r"^SGLANG_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert f"SGLang {version}" in TEXT
    assert list(Path(ROOT, ".venv-sglang").glob(f"lib/python3*/site-packages/sglang-{version}.dist-info"))
