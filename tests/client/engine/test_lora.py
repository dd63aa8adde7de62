"""LoRA adapters of PEFT on mapped weights: the base stays shared, and merging writes to this process's pages alone."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.daemons import Daemon, daemon
from tests.support.resources import private_nbytes
from weightcached.client import WeightSet, attach, bind, meta_parameters

TARGETS = ("q_proj", "v_proj")
TOKENS = torch.tensor([[1, 5, 9, 13]])
PAGE_NBYTES = 64 << 10
"""The largest that a page is on any machine: what is written is counted in whole ones."""


@pytest.fixture(scope="module")
def checkpoint(models: Callable[..., Path]) -> Path:
    """Matrices of several pages, and norms that the merge does not touch."""
    return models(hidden_size=256, head_dim=64, intermediate_size=512, num_hidden_layers=2, dtype="bfloat16")


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name, daemon(checkpoint, Path(name) / "run") as it:
        it.wait_until("ready")
        yield it


def attached(served: Daemon) -> WeightSet:
    runtime_dir = served.place.runtime_dir
    return attach(served.model_dir, mode="require", runtime_dir=runtime_dir, cache_dir=runtime_dir / "digests")


@pytest.fixture
def weights(served: Daemon) -> Iterator[WeightSet]:
    with attached(served) as it:
        yield it


@pytest.fixture
def base(weights: WeightSet, checkpoint: Path) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(checkpoint)
    with meta_parameters():
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    bind(model, weights)
    return model


def with_adapter(base: torch.nn.Module, seed: int = 0) -> Any:
    """An adapter that changes something: a fresh one of PEFT is the identity."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


def test_an_adapter_beside_mapped_weights_computes_and_trains_and_the_base_stays_shared(
    base: torch.nn.Module, weights: WeightSet
) -> None:
    plain = logits(base)
    model = with_adapter(base)
    assert not torch.equal(logits(model), plain)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))
    assert private_nbytes() == 0
    weights.verify()


def test_merging_writes_private_pages_another_engine_sees_nothing_and_reverting_is_exact(
    base: torch.nn.Module, weights: WeightSet, served: Daemon
) -> None:
    plain = logits(base)
    merged = [name for name in weights if name.split(".")[-2] in TARGETS]
    model = with_adapter(base)
    adapted = logits(model)
    model.merge_adapter()
    assert torch.allclose(logits(model), adapted, atol=0.1, rtol=0.1)
    assert sorted(weights.differing()) == sorted(merged)
    nbytes = sum(weights[name].nbytes for name in merged)
    assert nbytes <= private_nbytes() <= nbytes + 2 * PAGE_NBYTES * len(merged)
    with attached(served) as other:
        other.verify()
        assert private_nbytes() <= nbytes + 2 * PAGE_NBYTES * len(merged)
    model.unmerge_adapter()  # subtracts what was added, which in bfloat16 is not quite what was there
    assert private_nbytes() >= nbytes
    weights.revert()
    assert private_nbytes() == 0
    weights.verify()
    assert torch.equal(logits(model), adapted)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)


def test_a_saved_adapter_on_mapped_weights_gives_what_it_gives_on_weights_from_disk(
    base: torch.nn.Module, checkpoint: Path, tmp_path: Path
) -> None:
    adapted = with_adapter(base, seed=1)
    adapted.save_pretrained(tmp_path)
    from_disk = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    wanted = logits(peft.PeftModel.from_pretrained(from_disk, tmp_path).eval())
    mapped = peft.PeftModel.from_pretrained(adapted.unload(), tmp_path).eval()
    assert torch.equal(logits(mapped), wanted)
    assert private_nbytes() == 0
