"""Weights in the engine's module, whichever way they came: byte-identical to what `from_pretrained` makes."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.daemons import daemon
from tests.support.modules import bytes_of, state_of
from tests.support.recipes import recipe_of
from weightcached.client import attach
from weightcached.client.engine import model as engine_model
from weightcached.protocol.errors import BindError, MissingTensor, ModelConfigError, UnsupportedModel

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-sharded": {"shards": 3},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-float32": {"code": "F32", "dtype": "float32"},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
}


def digests(module: torch.nn.Module) -> dict[str, str]:
    """Name → digest of dtype, shape and bytes of everything in the module."""
    return {
        name: hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + bytes_of(tensor)).hexdigest()
        for name, tensor in state_of(module).items()
    }


@pytest.fixture(params=[*CASES, "minilm"])
def checkpoint(request: pytest.FixtureRequest, models: Callable[..., Path]) -> Path:
    if request.param == "minilm":
        directory: Path = request.getfixturevalue("minilm")
        return directory
    return models(**CASES[request.param])


def test_the_module_is_byte_identical_from_transformers_the_daemon_and_disk(
    checkpoint: Path, runtime_dir: Path
) -> None:
    recipe = recipe_of(checkpoint)
    plain = engine_model.load(recipe, None, dtype="auto")
    wanted = digests(plain)
    with daemon(checkpoint, runtime_dir):
        options: dict[str, Any] = {"mode": "require", "runtime_dir": runtime_dir, "wait_for_daemon_s": 30}
        with attach(checkpoint, cache_dir=runtime_dir / "digests", **options) as weights:
            bound = engine_model.load(recipe, weights, dtype="auto")
            assert weights.source == "daemon"
            assert digests(bound) == wanted
    with attach(checkpoint, mode="off", cache_dir=runtime_dir / "digests") as weights:
        from_disk = engine_model.load(recipe, weights, dtype="auto")
        assert digests(from_disk) == wanted
    # The daemon and both weight sets are gone: what is bound stays.
    assert digests(bound) == wanted
    assert not bound.training
    assert not plain.training


def test_tied_parameters_are_one_object(models: Callable[..., Path]) -> None:
    checkpoint = models(tie_word_embeddings=True)
    with attach(checkpoint, mode="off") as weights:
        module: Any = engine_model.load(recipe_of(checkpoint), weights, dtype="auto")
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_buffers_that_no_checkpoint_has_are_real(tiny: Path) -> None:
    with attach(tiny, mode="off") as weights:
        module: Any = engine_model.load(recipe_of(tiny), weights, dtype="auto")
    assert not any(tensor.is_meta for tensor in state_of(module).values())
    assert module.model.rotary_emb.inv_freq.abs().sum() > 0


def test_a_checkpoint_of_another_dtype_than_its_config_says_what_to_do(models: Callable[..., Path]) -> None:
    checkpoint = models(code="F32", dtype="bfloat16")
    with attach(checkpoint, mode="off") as weights, pytest.raises(BindError) as caught:
        engine_model.load(recipe_of(checkpoint), weights, dtype="auto")
    assert "--dtype" in str(caught.value.next_step)


def test_asking_for_the_dtype_is_the_same_as_transformers_conversion(models: Callable[..., Path]) -> None:
    checkpoint = models(code="F32", dtype="bfloat16")
    recipe = recipe_of(checkpoint)
    with attach(checkpoint, mode="off", dtype="bfloat16") as weights:
        bound = engine_model.load(recipe, weights, dtype="bfloat16")
    assert digests(bound) == digests(engine_model.load(recipe, None, dtype="bfloat16"))


def test_off_refuses_to_fill_in_what_the_checkpoint_lacks(models: Callable[..., Path], tmp_path: Path) -> None:
    """Transformers would go on with random values."""
    shutil.copytree(models(tie_word_embeddings=True), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(MissingTensor) as caught:
        engine_model.load(recipe_of(tmp_path / "m"), None, dtype="auto")
    assert "lm_head.weight" in str(caught.value.found)


@pytest.mark.parametrize("name", ["NoSuchModel", "T5ForConditionalGeneration"])
def test_what_this_engine_cannot_serve_is_said(tiny: Path, name: str) -> None:
    recipe = recipe_of(tiny)
    recipe.config.architectures = [name]
    recipe.config.is_encoder_decoder = name.startswith("T5")
    with pytest.raises(UnsupportedModel):
        engine_model.import_model_class(recipe.config)


def test_a_directory_without_a_tokenizer_is_said(models: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(models(), tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(ModelConfigError) as caught:
        engine_model.read_config_and_tokenizer(tmp_path / "m")
    assert caught.value.where == tmp_path / "m"
