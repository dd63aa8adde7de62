"""A directory of a LoRA adapter: Transformers reads it beside its base model, which is mapped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.support.modules import require_same, same_outputs, unmapped
from weightcached.client.transformers import from_pretrained, weights_of

CAUSAL = transformers.AutoModelForCausalLM
TOKENS = (3, 1, 4, 1, 5)


@pytest.fixture
def adapter(checkpoints: Callable, tmp_path: Path) -> Path:
    """An adapter of the tied Llama that changes its answers."""
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    peft.get_peft_model(CAUSAL.from_pretrained(checkpoints("llama-tied")[1]), config).save_pretrained(
        str(tmp_path / "lora")
    )
    return tmp_path / "lora"


def test_an_adapter_is_read_from_its_own_files_and_its_base_is_mapped(
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
