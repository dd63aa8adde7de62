"""The layout that Transformers makes: what its key holds, what is built, and models that no other layout can map."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file

from tests.support.modules import PADDED_BY_TRANSFORMERS, bytes_of, mapped_buffers, require_same, same_outputs, unmapped
from weightcached.client.transformers import from_pretrained, weights_of
from weightcached.client.transformers.engine import ADAPTER
from weightcached.protocol.config import Parallel
from weightcached.protocol.engines import EngineRequest
from weightcached.protocol.errors import (
    CacheConfigMismatch,
    DaemonAbsent,
    InvalidOption,
    MissingTensor,
    UnsupportedModel,
)


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


LEFT_OPEN: dict[str, dict[str, Any]] = {"deepseek-v2": {"num_experts_per_tok": 2}}
"""What a case's configuration does not say and a computation needs."""

ENGINE_MADE = ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2", "deepseek-v3", "gpt-oss", "llama-tied", "bert-words")


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINE_MADE)
def test_a_model_bound_to_what_was_made_is_the_one_that_transformers_loads(
    name: str, checkpoints: Callable, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    case, directory = checkpoints(name)
    serve(directory, "--engine", "transformers")
    kind = getattr(transformers, case.auto_class)
    more = LEFT_OPEN.get(name, {})
    model = from_pretrained(kind, directory, weight_cache={**cache, "layout": "transformers"}, **more)
    weights = weights_of(model)
    assert weights is not None
    assert (weights.source, weights.meta.config["layout"]) == ("daemon", "transformers")
    ordinary = kind.from_pretrained(directory, **more)
    require_same(model, ordinary)
    assert same_outputs(model, ordinary, (3, 1, 4, 1, 5, 9, 2, 6))
    assert unmapped(model) == (PADDED_BY_TRANSFORMERS if name == "bert-words" else set())
    assert mapped_buffers(model) == set()


def test_a_body_is_bound_to_what_was_made_with_its_head_and_another_class_is_another_key(
    checkpoints: Callable, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    directory = checkpoints("mixtral")[1]
    serve(directory, "--engine", "transformers")
    made = {**cache, "layout": "transformers"}
    body = from_pretrained(transformers.AutoModel, directory, weight_cache=made)
    require_same(body, transformers.AutoModel.from_pretrained(directory))
    assert unmapped(body) == set()
    with pytest.raises(CacheConfigMismatch) as caught:
        from_pretrained(
            transformers.AutoModel,
            directory,
            weight_cache={**made, "engine_arguments": ["--model-class", "MixtralModel"]},
        )
    assert [field.field for field in caught.value.fields] == ["engine.model_class"]


def test_it_is_saved_as_the_checkpoint_was(
    checkpoints: Callable, tmp_path: Path, serve: Callable[..., None], cache: dict[str, Any]
) -> None:
    """What Transformers stacks when it loads it takes apart when it saves, whichever way the model came."""
    directory = checkpoints("mixtral")[1]
    serve(directory, "--engine", "transformers")
    kind = transformers.MixtralForCausalLM
    from_pretrained(kind, directory, weight_cache={**cache, "layout": "transformers"}).save_pretrained(tmp_path / "a")
    kind.from_pretrained(directory).save_pretrained(tmp_path / "b")
    saved, ordinary = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert saved.keys() == ordinary.keys()
    assert any("experts.0" in name for name in saved)
    assert all(bytes_of(saved[name]) == bytes_of(ordinary[name]) for name in saved)


def test_where_no_daemon_is_transformers_reads_the_files(checkpoints: Callable, runtime_dir: Path) -> None:
    directory = checkpoints("mixtral")[1]
    asked = {"layout": "transformers", "runtime_dir": runtime_dir}
    model = from_pretrained(transformers.MixtralForCausalLM, directory, weight_cache=asked)
    assert weights_of(model) is None
    with pytest.raises(DaemonAbsent):
        from_pretrained(transformers.MixtralForCausalLM, directory, weight_cache={**asked, "mode": "require"})
