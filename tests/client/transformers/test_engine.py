"""The layout that Transformers makes: what its key holds, what is built, and models that no other layout can map."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.modules import PADDED_BY_TRANSFORMERS, bytes_of, mapped_buffers, require_same, same_outputs, unmapped
from weightcached.client.transformers import from_pretrained, weights_of
from weightcached.client.transformers.engine import ADAPTER
from weightcached.protocol.config import Parallel
from weightcached.protocol.engines import EngineRequest
from weightcached.protocol.errors import InvalidOption, MissingTensor, UnsupportedModel


def request(directory: Path, *arguments: str, tp_size: int = 1, dtype: Any = "auto") -> EngineRequest:
    parallel = Parallel(tp_size=tp_size, tp_rank=0)
    return EngineRequest(model_dir=directory, parallel=parallel, dtype=dtype, arguments=arguments)


def build(directory: Path, *arguments: str) -> dict[str, Any]:
    return {one.name: one for one in ADAPTER.build(request(directory, *arguments), lambda _: None).tensors}


def test_the_key_is_of_the_inputs_and_reads_no_weight(checkpoints: Callable, tmp_path: Path) -> None:
    directory = checkpoints("mixtral")[1]
    bare = shutil.copytree(directory, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    key = ADAPTER.key(request(directory))
    assert key == ADAPTER.key(request(bare))
    assert key == ADAPTER.key(request(directory, "--model-class", "MixtralForCausalLM"))
    assert key["transformers"] == transformers.__version__
    assert key != ADAPTER.key(request(directory, "--model-class=MixtralModel"))
    assert key != ADAPTER.key(request(directory, dtype="float32"))


def test_the_key_of_a_quantized_checkpoint_has_the_form_that_is_left_of_it_here(
    checkpoints: Callable, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoints("llama-int4-group")[1], tmp_path / "packed")
    config = json.loads((directory / "config.json").read_text())
    forms = []
    for status in ("compressed", "frozen"):  # weights packed, or as floating-point numbers that are quantized
        config["quantization_config"]["quantization_status"] = status
        (directory / "config.json").write_text(json.dumps(config))
        forms.append(ADAPTER.key(request(directory))["form"])
    assert forms[0] != forms[1]


def test_what_is_built_is_the_state_of_the_module_that_transformers_loads(checkpoints: Callable) -> None:
    case, directory = checkpoints("qwen2-moe")
    ordinary = getattr(transformers, case.auto_class).from_pretrained(directory)
    made = build(directory)
    state = ordinary.state_dict(keep_vars=True)
    assert list(made) == list(state)
    assert any("experts.gate_up_proj" in name for name in made)
    for name, one in made.items():
        assert bytes_of(one.tensor) == bytes_of(state[name]), name
        assert one.kind == "parameter"


def test_a_buffer_is_told_from_a_parameter(checkpoints: Callable) -> None:
    kinds = {name: one.kind for name, one in build(checkpoints("deepseek-v3")[1]).items()}
    assert {name.rpartition(".")[2] for name, kind in kinds.items() if kind == "buffer"} == {"e_score_correction_bias"}


def test_random_values_are_not_shared(checkpoints: Callable) -> None:
    with pytest.raises(MissingTensor) as caught:
        build(checkpoints("bert")[1], "--model-class", "BertForTokenClassification")
    assert "classifier.weight" in str(caught.value.found)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--attn-implementation", "eager"], InvalidOption),
        (["--model-class"], InvalidOption),
        (["--model-class", "NoSuchModel"], UnsupportedModel),
        (["--model-class", "AutoModel"], UnsupportedModel),
    ],
    ids=str,
)
def test_arguments_that_it_does_not_know_are_refused(
    arguments: list[str], error: type[Exception], checkpoints: Callable
) -> None:
    with pytest.raises(error):
        ADAPTER.key(request(checkpoints("llama-tied")[1], *arguments))


def test_it_has_whole_models_only(checkpoints: Callable) -> None:
    with pytest.raises(InvalidOption, match="whole models"):
        ADAPTER.key(request(checkpoints("llama-tied")[1], tp_size=2))


ENGINE_MADE = ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2", "deepseek-v3", "gpt-oss", "llama-tied", "bert-words")


@pytest.mark.parametrize("name", ENGINE_MADE)
def test_a_model_bound_to_what_was_made_is_the_one_that_transformers_loads(
    name: str, checkpoints: Callable, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    case, directory = checkpoints(name)
    serve(directory, "--engine", "transformers")
    kind = getattr(transformers, case.auto_class)
    model = from_pretrained(kind, directory, weight_cache={**cache, "layout": "transformers"})
    weights = weights_of(model)
    assert weights is not None
    assert (weights.source, weights.meta.config["layout"]) == ("daemon", "transformers")
    ordinary = kind.from_pretrained(directory)
    require_same(model, ordinary)
    assert same_outputs(model, ordinary, (3, 1, 4, 1, 5, 9, 2, 6))
    assert unmapped(model) == (PADDED_BY_TRANSFORMERS if name == "bert-words" else set())
    assert mapped_buffers(model) == set()
