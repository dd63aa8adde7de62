"""Parameters that a model has of its own would stay those of the old generation: refused by name, nothing exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
PROMPT = [5, 9, 2, 7, 1, 3, 8, 6]
TOKENS = 12


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


def continued(model: Any, tokens: Sequence[int], *, compiled: bool, **options: Any) -> list[int]:
    """The tokens after these."""
    compiling = transformers.CompileConfig(backend="eager")
    compiling._compile_all_devices = True
    made = model.generate(
        torch.tensor([tokens]),
        do_sample=False,
        min_new_tokens=TOKENS,
        max_new_tokens=TOKENS,
        compile_config=compiling,
        disable_compile=not compiled,
        **options,
    )
    return [int(token) for token in made[0, len(tokens) :]]


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # its newer name is not in 5.0
@pytest.mark.parametrize(
    "compiled", [pytest.param(False, id="as written"), pytest.param(True, id="compiled", marks=pytest.mark.slow)]
)
def test_what_is_generated_with_a_static_cache_after_a_swap_is_of_the_new_weights(
    checkpoints: Callable, serve: Callable[..., None], cache: dict[str, Any], tmp_path: Path, compiled: bool
) -> None:
    """Keys and values that a call has for itself need nothing. Those that are kept between calls are of the old
    weights, and have to be dropped: a conversation that goes on with them is none of the new ones.
    """
    directory = checkpoints("llama-tied")[1]
    tuned = fine_tuned(directory, tmp_path / "tuned")
    serve(directory)
    model = from_pretrained(CAUSAL, directory, weight_cache={**cache, "want": "current"})
    weights, plain = bound_to(model), CAUSAL.from_pretrained(tuned)
    static: dict[str, Any] = {"cache_implementation": "static", "compiled": compiled}
    kept = transformers.StaticCache(config=model.config, max_cache_len=2 * (len(PROMPT) + TOKENS))
    with weights.barrier.reading():
        before = continued(model, PROMPT, **static)
        assert before == continued(model, PROMPT, past_key_values=kept, compiled=compiled)
    assert before == continued(CAUSAL.from_pretrained(directory), PROMPT, **static)
    assert hasattr(model, "_compiled_call") is compiled
    update(tuned, runtime_dir=cache["runtime_dir"])
    swapped(model, weights)
    after, longer = continued(plain, PROMPT, **static), [*PROMPT, *before, *PROMPT]
    goes_on = continued(plain, longer, **static)
    assert before != after
    with weights.barrier.reading():
        assert continued(model, PROMPT, **static) == after
        assert continued(model, longer, **static) == goes_on
        assert continued(model, longer, past_key_values=kept, compiled=compiled) != goes_on
        kept.reset()
        assert continued(model, longer, past_key_values=kept, compiled=compiled) == goes_on
