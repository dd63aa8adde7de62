"""LoRA adapters of PEFT on mapped weights: read from their own files, computed with, trained; the base stays mapped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.modules import bytes_of, require_same, same_outputs, unmapped
from weightcached.client.transformers import from_pretrained, weights_of

peft: Any = pytest.importorskip("peft")
CAUSAL = transformers.AutoModelForCausalLM
TOKENS = (3, 1, 4, 1, 5)


@pytest.fixture
def adapter(checkpoints: Callable, tmp_path: Path) -> Path:
    """An adapter of the tied Llama that changes its answers."""
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    peft.get_peft_model(CAUSAL.from_pretrained(checkpoints("llama-tied")[1]), config).save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


def test_an_adapter_s_directory_is_loaded_over_a_mapped_base(
    checkpoints: Callable, adapter: Path, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    serve(checkpoints("llama-tied")[1])
    model = from_pretrained(CAUSAL, adapter, weight_cache=cache)
    ordinary = CAUSAL.from_pretrained(adapter)
    assert weights_of(model) is not None
    require_same(model, ordinary)
    assert same_outputs(model, ordinary, TOKENS)
    assert all(".lora_" in name for name in unmapped(model))
    assert len(unmapped(model)) == 8


def test_an_adapter_is_put_on_a_mapped_model_and_trained(
    checkpoints: Callable, adapter: Path, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    directory = checkpoints("llama-tied")[1]
    serve(directory)
    base = from_pretrained(CAUSAL, directory, weight_cache=cache)
    weights = weights_of(base)
    assert weights is not None
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    ordinary = peft.PeftModel.from_pretrained(CAUSAL.from_pretrained(directory), adapter, is_trainable=True)
    assert same_outputs(model, ordinary, TOKENS)
    before = {name: bytes_of(parameter) for name, parameter in model.named_parameters()}
    ids = torch.tensor([TOKENS])
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0).step()
    changed = {name for name, parameter in model.named_parameters() if bytes_of(parameter) != before[name]}
    assert changed
    assert all(".lora_" in name for name in changed | unmapped(model))
    weights.verify()
