"""Parameters that a model has of its own would stay those of the old generation: refused by name, nothing exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.fine_tuned import fine_tuned
from tests.support.modules import bytes_of, require_same, unmapped
from weightcached.client import Swapped, WeightSet
from weightcached.client.control import update
from weightcached.client.transformers import from_pretrained, weights_of
from weightcached.client.transformers.switching import swap_in
from weightcached.protocol.errors import SwapRefused

CAUSAL = transformers.AutoModelForCausalLM


def cloned(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.clone())


def moved(model: Any) -> None:
    """The same parameter, other memory: what ``Module.to`` does."""
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data.clone()


def untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.clone())


def cast(model: Any) -> None:
    model.model.layers[0].self_attn.float()


def bound_to(model: Any) -> WeightSet:
    weights = weights_of(model)
    assert weights is not None
    return weights


def swapped(model: Any, weights: WeightSet) -> Swapped:
    with weights.stage() as staged, weights.barrier.stopped() as stopped:
        return swap_in(model, weights, staged, stopped)


OWN: Mapping[Callable[[Any], None], list[str]] = {
    cloned: ["model.norm.weight"],
    moved: ["model.layers.1.mlp.down_proj.weight"],
    untied: ["lm_head.weight"],
    cast: [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"],
}


def test_parameters_of_its_own_are_refused_by_name_and_nothing_is_exchanged(
    checkpoints: Callable, serve: Callable[..., None], cache: dict[str, Any], tmp_path: Path
) -> None:
    directory = checkpoints("llama-tied")[1]
    tuned = fine_tuned(directory, tmp_path / "tuned")
    serve(directory)
    models = {make: from_pretrained(CAUSAL, directory, weight_cache={**cache, "want": "current"}) for make in OWN}
    whole = from_pretrained(CAUSAL, directory, weight_cache={**cache, "want": "current"})
    update(tuned, runtime_dir=cache["runtime_dir"])
    for make, names in OWN.items():
        model = models[make]
        weights = bound_to(model)
        before, generation = {name: bytes_of(tensor) for name, tensor in weights.items()}, weights.generation
        make(model)
        with pytest.raises(SwapRefused, match=f"{len(names)} parameters that do not lie in the weights'") as raised:
            swapped(model, weights)
        assert raised.value.found == ", ".join(names)
        assert (weights.generation, unmapped(model)) == (generation, set(names))
        assert {name: bytes_of(tensor) for name, tensor in weights.items()} == before
        assert weights.lease is not None
        weights.lease.ping()
        assert weights.lease.generation == generation
    swapped(whole, bound_to(whole))
    require_same(whole, CAUSAL.from_pretrained(tuned))
