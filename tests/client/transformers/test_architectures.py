"""Every architecture: what is mapped from a daemon is what an ordinary ``from_pretrained`` makes, to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.modules import PADDED_BY_TRANSFORMERS, mapped_buffers, require_same, same_outputs, unmapped
from weightcached.client.transformers import from_pretrained, weights_of
from weightcached.protocol.errors import UnsupportedModel

MAPPED = (
    "llama",
    "llama-tied",
    "llama-biased",
    "llama-f16",
    "llama-files",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "phi3-tied",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt2-untied",
    "olmo2",
    "gpt-oss",
    "bert",
    "bert-words",
    "bert-words-untied",
    "bert-sequences",
    "bert-tokens",
)
CONVERTED = ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2", "deepseek-v3")
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.mark.parametrize("name", MAPPED)
def test_a_model_is_the_one_that_transformers_loads_and_all_its_parameters_are_mapped(
    name: str, checkpoints: Callable, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    case, directory = checkpoints(name)
    serve(directory)
    kind = getattr(transformers, case.auto_class)
    model = from_pretrained(kind, directory, weight_cache=cache)
    weights = weights_of(model)
    assert weights is not None
    assert weights.source == "daemon"
    ordinary = kind.from_pretrained(directory)
    require_same(model, ordinary)
    assert same_outputs(model, ordinary, TOKENS)
    assert unmapped(model) == (PADDED_BY_TRANSFORMERS if name == "bert-words" else set())
    assert mapped_buffers(model) == set()
    assert unmapped(ordinary) == dict(ordinary.named_parameters(remove_duplicate=False)).keys()


@pytest.mark.parametrize("name", CONVERTED)
def test_what_transformers_would_stack_is_refused_by_name_with_the_way_that_works(
    name: str, checkpoints: Callable, cache: dict[str, Any], serve: Callable[..., None]
) -> None:
    case, directory = checkpoints(name)
    serve(directory)
    with pytest.raises(UnsupportedModel) as caught:
        from_pretrained(getattr(transformers, case.auto_class), directory, weight_cache=cache)
    assert "experts.0" in str(caught.value.found)
    assert "serve --engine transformers" in str(caught.value.next_step)


def test_the_shipped_encoder(serve: Callable[..., None], cache: dict[str, Any], minilm: Path) -> None:
    """A real model: its checkpoint's dtype stands in the files only, and it holds a buffer that is computed today."""
    serve(minilm)
    model = from_pretrained(transformers.AutoModel, minilm, weight_cache=cache)
    weights = weights_of(model)
    assert weights is not None
    assert weights.source == "daemon"
    ordinary = transformers.AutoModel.from_pretrained(minilm)
    require_same(model, ordinary)
    assert same_outputs(model, ordinary, TOKENS)
    assert unmapped(model) == set()
