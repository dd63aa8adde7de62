"""Checkpoints that are quantized already: mapped as Transformers keeps them, or refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engines.cases import Case
from tests.engines.cases.disk import LLAMA, stored
from tests.engines.checkpoints import write
from tests.support.modules import require_same, unmapped
from tests.support.quantized_cases import CASES as WAYS
from weightcached.client import attach
from weightcached.client.transformers import from_pretrained
from weightcached.client.transformers.loading import binding_to
from weightcached.protocol.errors import BindError, UnsupportedModel

CAUSAL = transformers.AutoModelForCausalLM


def compressed(directory: Path, to: Path) -> Path:
    """The same checkpoint as its tools write it: what lies in the files is packed."""
    shutil.copytree(directory, to)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"]["quantization_status"] = "compressed"
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_packed_weights_are_mapped_as_they_are(
    checkpoints: Callable, tmp_path: Path, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    directory = compressed(checkpoints("llama-int4-group")[1], tmp_path / "packed")
    serve(directory)
    model = from_pretrained(CAUSAL, directory, weight_cache=cache)
    ordinary = CAUSAL.from_pretrained(directory)
    assert model.model.layers[0].self_attn.q_proj.weight_packed.dtype == torch.int32
    require_same(model, ordinary)
    assert unmapped(model) == set()
    ids = torch.tensor([[1, 2, 3]])  # at its first computation compressed-tensors unpacks them, into memory of its own
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, ordinary(ids).logits)


def test_scales_that_transformers_would_cast_are_refused_by_name(
    checkpoints: Callable, tmp_path: Path, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    directory = compressed(checkpoints("llama-int8-channel")[1], tmp_path / "scaled")
    serve(directory)
    with pytest.raises(BindError) as caught:
        from_pretrained(CAUSAL, directory, weight_cache=cache)
    assert "weight_scale is float32, not bfloat16" in str(caught.value.found)


@pytest.mark.parametrize("way", ["fp8, blocks", "int8, channels"])
def test_what_transformers_makes_of_other_values_is_mapped_from_an_engine_made_layout(
    way: str, tmp_path: Path, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    """fp8 is dequantized where no device computes with it; scales are cast to the model's dtype."""
    quantization, scheme = WAYS[way]
    case = Case("llama", LLAMA, edit=stored(quantization, scheme))
    directory = compressed(write(case, tmp_path / "written"), tmp_path / "quantized")
    serve(directory, "--engine", "transformers")
    model = from_pretrained(CAUSAL, directory, weight_cache={**cache, "layout": "transformers"})
    ordinary = CAUSAL.from_pretrained(directory)
    require_same(model, ordinary)
    assert unmapped(model) == set()
    assert model.config.to_dict() == ordinary.config.to_dict()
    with attach(directory, mode="off") as weights, pytest.raises((BindError, UnsupportedModel)), binding_to(weights):
        CAUSAL.from_pretrained(directory)


def test_a_module_that_is_quantized_otherwise_than_its_state_is_refused(
    checkpoints: Callable, tmp_path: Path, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    """Transformers alone would go on with random weights in the place of those that are packed."""
    directory = compressed(checkpoints("llama-int4-group")[1], tmp_path / "packed")
    serve(directory, "--engine", "transformers")
    made = {**cache, "layout": "transformers"}
    otherwise = transformers.CompressedTensorsConfig(dequantize=True)
    with pytest.raises(BindError) as caught:
        from_pretrained(CAUSAL, directory, quantization_config=otherwise, weight_cache=made)
    assert "proj.weight" in str(caught.value.found)
    assert unmapped(from_pretrained(CAUSAL, directory, weight_cache=made)) == set()
