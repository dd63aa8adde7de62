"""Fixtures for the engine's tests: checkpoints with a tokenizer, a short runtime directory, the real encoder.

Transformers keeps threads, descriptors and memory once it has been imported, so what is left behind is not counted
here; the processes that these tests start are ended by whoever started them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import tiny_llama
from weightcached.client.demo.checkpoint import write_tokenizer


@pytest.fixture(autouse=True)
def _nothing_left() -> None:
    """Replaces the check that the other tests of the client have."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``models(**overrides)``: a tiny checkpoint of a dense family with a tokenizer, made once for equal overrides."""
    made: dict[str, Path] = {}

    def make(**overrides: Any) -> Path:
        key = repr(sorted(overrides.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("model") / "checkpoint"
            folder.mkdir()
            vocabulary = write_tokenizer(folder)
            settings = {"vocab_size": vocabulary, "eos_token_id": 0, "max_position_embeddings": 256}
            made[key] = tiny_llama(folder, **{**settings, **overrides})
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny(models: Callable[..., Path]) -> Path:
    """A tiny Llama that generates."""
    return models()
