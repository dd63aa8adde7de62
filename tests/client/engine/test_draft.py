"""Several models on one host: a daemon for each under a name of its own, and a draft model beside its target."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.daemons import Daemon, daemon
from tests.support.resources import private_nbytes
from weightcached.client import WeightSet, attach, bind, meta_parameters
from weightcached.protocol.errors import CacheConfigMismatch

TOKENS = torch.tensor([[1, 5, 9, 13]])


@pytest.fixture(scope="module")
def served(models: Callable[..., Path]) -> Iterator[dict[str, Daemon]]:
    """A target of four layers and a draft of one, in one runtime directory."""
    checkpoints = {
        "target": models(num_hidden_layers=4, dtype="bfloat16"),
        "draft": models(num_hidden_layers=1, dtype="bfloat16"),
    }
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp"))
        daemons = {
            name: stack.enter_context(daemon(checkpoint, Path(folder) / "run", name=name))
            for name, checkpoint in checkpoints.items()
        }
        for each in daemons.values():
            each.wait_until("ready")
        yield daemons


def attached(model: Daemon, place: Daemon) -> WeightSet:
    runtime_dir = place.place.runtime_dir
    options: dict[str, Any] = {"mode": "require", "runtime_dir": runtime_dir, "cache_dir": runtime_dir / "digests"}
    return attach(model.model_dir, name=place.place.name, **options)


def bound(weights: WeightSet, checkpoint: Path) -> Any:
    config = AutoConfig.from_pretrained(checkpoint)
    with meta_parameters():
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    bind(model, weights)
    return model


def test_a_draft_speculates_for_its_target_and_both_are_mapped(served: dict[str, Daemon]) -> None:
    """Assisted generation is greedy decoding of the target, whatever the draft proposes: the tokens are the same."""
    target, draft = served["target"], served["draft"]
    with attached(target, target) as large, attached(draft, draft) as small:
        assert large.generation != small.generation
        model, assistant = bound(large, target.model_dir), bound(small, draft.model_dir)
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        asked: list[int] = []
        assistant.register_forward_hook(lambda *_: asked.append(1))
        alone = model.generate(TOKENS, **options)
        assert not asked
        together = model.generate(TOKENS, assistant_model=assistant, **options)
        assert asked
        assert torch.equal(alone, together)
        assert private_nbytes() == 0
        assert [len(each.report().leases) for each in served.values()] == [1, 1]


def test_a_name_mixed_up_is_a_mismatch_that_says_in_what(served: dict[str, Daemon]) -> None:
    with pytest.raises(CacheConfigMismatch) as caught:
        attached(served["draft"], served["target"])
    assert "num_hidden_layers: daemon has 4, client asks for 1" in str(caught.value)


def test_one_of_them_given_up_leaves_the_other(served: dict[str, Daemon], models: Callable[..., Path]) -> None:
    """`status` shows all of a host; `release --name` gives up one."""
    runtime_dir = served["target"].place.runtime_dir

    def run(*words: str) -> str:
        command = [sys.executable, "-P", "-m", "weightcached.daemon", *words, "--runtime-dir", str(runtime_dir)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    checkpoint = models(num_hidden_layers=2, dtype="bfloat16")
    with daemon(checkpoint, runtime_dir, name="other") as other:
        other.wait_until("ready")
        shown = json.loads(run("status", "--json"))["daemons"]
        assert sorted(each["place"] for each in shown) == [
            f"{name}/host-tp0of1" for name in ("draft", "other", "target")
        ]
        run("release", "--name", "other")
        assert other.process.wait(60) == 0
    shown = json.loads(run("status", "--json"))["daemons"]
    assert sorted(each["place"].partition("/")[0] for each in shown) == ["draft", "target"]
    with attached(served["target"], served["target"]) as weights:
        weights.verify()
