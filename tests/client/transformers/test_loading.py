"""What is taken from the cache, what is not, and what is refused: by argument, by class, and by what the place is."""

import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from prometheus_client import REGISTRY
from safetensors.torch import load_file, save_file

from tests.support.daemons import digest_of
from tests.support.modules import bytes_of, require_same, unmapped
from weightcached.client.transformers import from_pretrained, weights_from_cache, weights_of
from weightcached.client.transformers.loading import CLOSING
from weightcached.protocol.errors import (
    BindError,
    CacheConfigMismatch,
    CheckpointMismatch,
    CheckpointUnproven,
    DaemonAbsent,
    InvalidOption,
    InvalidPlace,
)
from weightcached.protocol.places import Place, host_device

CAUSAL = transformers.AutoModelForCausalLM
Serve = Callable[..., None]


@pytest.fixture
def llama(checkpoints: Callable) -> Path:
    directory: Path = checkpoints("llama-tied")[1]
    return directory


@pytest.fixture
def bert(checkpoints: Callable) -> Path:
    directory: Path = checkpoints("bert")[1]
    return directory


def fallbacks(place: str = "default/host-tp0of1") -> float:
    return REGISTRY.get_sample_value("weightcached_client_disk_fallbacks_total", {"place": place}) or 0.0


def without_weights(directory: Path, to: Path) -> Path:
    """A container's view of a checkpoint: everything but the weights."""
    shutil.copytree(directory, to, ignore=shutil.ignore_patterns("*.safetensors"))
    return to


def test_an_ordinary_call_in_a_block_is_mapped_and_one_after_it_is_not(
    llama: Path, serve: Serve, cache: dict[str, Any]
) -> None:
    serve(llama)
    with weights_from_cache(**cache):
        model = CAUSAL.from_pretrained(llama)
        body = transformers.LlamaModel.from_pretrained(llama)
    for mapped in (model, body):
        assert unmapped(mapped) == set()
        assert weights_of(mapped) is not None
    after = CAUSAL.from_pretrained(llama)
    assert unmapped(after) == dict(after.named_parameters(remove_duplicate=False)).keys()
    assert weights_of(after) is None
    require_same(model, after)
    require_same(body, transformers.AutoModel.from_pretrained(llama))


def test_attributes_are_those_that_transformers_leaves(
    llama: Path, tmp_path: Path, serve: Serve, cache: dict[str, Any]
) -> None:
    llama = Path(shutil.copytree(llama, tmp_path / "model"))
    serve(llama)
    (llama / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7, "eos_token_id": 3}))
    asked = {"dtype": torch.bfloat16, "attn_implementation": "eager", "output_attentions": True}
    model, info = from_pretrained(CAUSAL, str(llama), output_loading_info=True, weight_cache=cache, **asked)
    ordinary, expected = CAUSAL.from_pretrained(str(llama), output_loading_info=True, **asked)
    assert info == expected
    assert model.config.to_dict() == ordinary.config.to_dict()
    assert model.generation_config.to_dict() == ordinary.generation_config.to_dict()
    assert model.generation_config.max_new_tokens == 7
    assert (model.name_or_path, model.dtype) == (ordinary.name_or_path, ordinary.dtype)
    assert model.config._attn_implementation == "eager"


def test_a_model_of_one_s_own_configuration_is_bound_as_it_is(llama: Path, serve: Serve, cache: dict[str, Any]) -> None:
    serve(llama)
    config = transformers.AutoConfig.from_pretrained(llama, num_hidden_layers=1)
    model = from_pretrained(transformers.LlamaForCausalLM, llama, config=config, weight_cache=cache)
    ordinary = transformers.LlamaForCausalLM.from_pretrained(llama, config=config)
    assert len(model.model.layers) == 1
    require_same(model, ordinary)
    assert unmapped(model) == set()


def test_a_head_that_the_checkpoint_lacks_is_initialised_with_the_warning_of_transformers(
    bert: Path,
    serve: Serve,
    cache: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve(bert)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")  # other tests may have asked for less
    model, info = from_pretrained(
        transformers.BertForSequenceClassification, bert, num_labels=5, output_loading_info=True, weight_cache=cache
    )
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert any("classifier.weight" in record.getMessage() for record in caplog.records)
    assert unmapped(model) == info["missing_keys"]
    assert model.classifier.weight.shape == (5, 256)
    assert model.classifier.weight.abs().sum() > 0
    assert not any(parameter.is_meta for parameter in model.parameters())
    body = transformers.AutoModel.from_pretrained(bert)
    assert bytes_of(model.bert.pooler.dense.weight) == bytes_of(body.pooler.dense.weight)


def test_training_changes_the_engine_s_own_pages_only(llama: Path, serve: Serve, cache: dict[str, Any]) -> None:
    serve(llama)
    model = from_pretrained(CAUSAL, llama, weight_cache=cache)
    other = from_pretrained(CAUSAL, llama, weight_cache=cache)
    before = bytes_of(other.model.norm.weight)
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert bytes_of(model.model.norm.weight) != before
    assert bytes_of(other.model.norm.weight) == before
    weights = weights_of(other)
    assert weights is not None
    weights.verify()


def test_a_mapped_model_is_saved_as_any_other(llama: Path, tmp_path: Path, serve: Serve, cache: dict[str, Any]) -> None:
    """All its parameters are parts of one piece of memory, of which only theirs may be written."""
    serve(llama)
    from_pretrained(CAUSAL, llama, weight_cache=cache).save_pretrained(tmp_path / "saved")
    CAUSAL.from_pretrained(llama).save_pretrained(tmp_path / "ordinary")
    saved, ordinary = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("saved", "ordinary"))
    assert saved == ordinary


def test_the_lease_ends_with_the_model(llama: Path, serve: Serve, cache: dict[str, Any]) -> None:
    serve(llama)
    model = from_pretrained(CAUSAL, llama, weight_cache=cache)
    weights, kept = weights_of(model), model.model.norm.weight
    assert weights is not None
    assert weights.state == "connected"
    value = bytes_of(kept)
    del model
    import gc

    gc.collect()
    for thread in threading.enumerate():
        if thread.name == CLOSING:
            thread.join()
    assert str(weights.state) == "closed"
    assert bytes_of(kept) == value


def test_an_absent_daemon_is_a_fallback_into_transformers_that_is_told_and_counted(
    llama: Path, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = fallbacks()
    with caplog.at_level(logging.WARNING, logger="weightcached.client"):
        model = from_pretrained(CAUSAL, llama, weight_cache={"runtime_dir": runtime_dir})
    assert fallbacks() == before + 1
    path = Place(runtime_dir, "default", host_device(tp_size=1, tp_rank=0)).socket_path
    assert any(str(path) in record.getMessage() for record in caplog.records)
    assert weights_of(model) is None
    require_same(model, CAUSAL.from_pretrained(llama))


def test_off_never_looks_for_a_daemon_and_require_never_reads_the_disk(llama: Path, runtime_dir: Path) -> None:
    before = fallbacks()
    assert weights_of(from_pretrained(CAUSAL, llama, weight_cache={"mode": "off", "name": "nobody"})) is None
    with pytest.raises(DaemonAbsent):
        from_pretrained(CAUSAL, llama, weight_cache={"mode": "require", "runtime_dir": runtime_dir})
    assert fallbacks() == before


def test_what_is_no_absence_is_an_error_and_no_fallback(llama: Path, runtime_dir: Path) -> None:
    path = Place(runtime_dir, "default", host_device(tp_size=1, tp_rank=0)).socket_path
    path.parent.mkdir(mode=0o755)
    path.write_text("not a socket")
    with pytest.raises(InvalidPlace):
        from_pretrained(CAUSAL, llama, weight_cache={"runtime_dir": runtime_dir})


def test_another_checkpoint_and_another_config_are_refused(
    llama: Path, checkpoints: Callable, tmp_path: Path, serve: Serve, cache: dict[str, Any]
) -> None:
    serve(llama)
    changed = Path(shutil.copytree(llama, tmp_path / "changed"))
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatch):
        from_pretrained(CAUSAL, changed, weight_cache=cache)
    with pytest.raises(CacheConfigMismatch) as caught:
        from_pretrained(CAUSAL, checkpoints("llama")[1], weight_cache=cache)
    assert "model.tie_word_embeddings" in [field.field for field in caught.value.fields]
    with pytest.raises(CacheConfigMismatch):
        from_pretrained(CAUSAL, llama, dtype="float32", weight_cache={**cache, "dtype": "float32"})


def test_a_dtype_that_the_daemon_does_not_hold_is_refused_and_one_that_it_makes_is_mapped(
    llama: Path, serve: Serve, cache: dict[str, Any]
) -> None:
    serve(llama, dtype="float32")
    held = {**cache, "dtype": "float32"}
    with pytest.raises(BindError) as caught:
        from_pretrained(CAUSAL, llama, dtype=torch.float16, weight_cache=held)
    assert "is float32, not float16" in str(caught.value.found)
    assert "--dtype float16" in str(caught.value.next_step)
    model = from_pretrained(CAUSAL, llama, dtype=torch.float32, weight_cache=held)
    require_same(model, CAUSAL.from_pretrained(llama, dtype=torch.float32))
    assert unmapped(model) == set()


def test_a_checkpoint_whose_weights_are_not_visible_is_bound_by_its_digest(
    llama: Path, tmp_path: Path, serve: Serve, cache: dict[str, Any]
) -> None:
    serve(llama)
    bare = without_weights(llama, tmp_path / "bare")
    ordinary = CAUSAL.from_pretrained(llama)
    require_same(from_pretrained(CAUSAL, bare, weight_cache={**cache, "digest": digest_of(llama)}), ordinary)
    with pytest.raises(CheckpointUnproven):
        from_pretrained(CAUSAL, bare, weight_cache=cache)


@pytest.mark.parametrize("argument", [{"variant": "fp16"}, {"use_safetensors": False}], ids=str)
def test_arguments_for_other_files_are_refused_by_name(argument: dict[str, Any], llama: Path) -> None:
    with pytest.raises(InvalidOption) as caught:
        from_pretrained(CAUSAL, llama, weight_cache={"mode": "off"}, **argument)
    assert next(iter(argument)) in str(caught.value)


def test_a_state_dict_and_no_checkpoint_is_refused_by_name(llama: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(llama)
    with pytest.raises(InvalidOption, match="state_dict"), weights_from_cache(mode="off"):
        transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict={})


@pytest.mark.parametrize("option", ["layout", "quantization", "tp_size"])
def test_shares_and_other_names_are_no_module_s_parameters(option: str, llama: Path) -> None:
    with pytest.raises(InvalidOption) as caught:
        from_pretrained(CAUSAL, llama, weight_cache={option: "fused"})
    assert option in str(caught.value)


def test_another_layout_is_refused_with_those_that_there_are(llama: Path) -> None:
    with pytest.raises(InvalidOption, match=r"Transformers' models have layout hf or transformers; .*found: fused$"):
        from_pretrained(CAUSAL, llama, weight_cache={"layout": "fused"})


def test_an_option_that_does_not_exist_is_an_error_before_anything_is_loaded(llama: Path) -> None:
    with pytest.raises(InvalidOption, match=r"expected: .*runtime_dir.*; found: nmae, did you mean name\?"):
        from_pretrained(CAUSAL, llama, weight_cache={"mode": "off", "nmae": "mine"})


def test_a_class_that_shares_nothing_with_the_checkpoint_is_refused(
    llama: Path, serve: Serve, cache: dict[str, Any]
) -> None:
    serve(llama)
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    with pytest.raises(BindError) as caught:
        from_pretrained(transformers.GPT2LMHeadModel, llama, config=config, weight_cache=cache)
    assert "none of the parameters" in str(caught.value)


def test_a_hub_id_is_where_transformers_has_it(
    llama: Path, tmp_path: Path, serve: Serve, cache: dict[str, Any]
) -> None:
    """Name, revision and cache of the hub are Transformers' own arguments; the daemon serves the same snapshot."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--some-org--Model"
    snapshot = Path(shutil.copytree(llama, repository / "snapshots" / commit))
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    serve(snapshot)
    asked = {"revision": "v1", "cache_dir": tmp_path / "hub", "local_files_only": True}
    kind = transformers.LlamaForCausalLM  # an Auto class would ask the hub for an adapter, whatever it is told
    model = from_pretrained(kind, "some-org/Model", weight_cache=cache, **asked)
    ordinary = kind.from_pretrained("some-org/Model", **asked)
    assert weights_of(model) is not None
    assert model.name_or_path == ordinary.name_or_path == "some-org/Model"
    require_same(model, ordinary)
    assert unmapped(model) == set()


def test_a_device_map_to_this_host_s_memory_is_honoured_and_one_to_a_disk_is_refused(
    checkpoints: Callable, tmp_path: Path, serve: Serve, cache: dict[str, Any]
) -> None:
    directory = checkpoints("llama")[1]
    serve(directory)
    model = from_pretrained(CAUSAL, directory, device_map="cpu", weight_cache=cache)
    require_same(model, CAUSAL.from_pretrained(directory, device_map="cpu"))
    assert unmapped(model) == set()
    with pytest.raises(InvalidOption, match="device_map"):
        from_pretrained(
            CAUSAL,
            directory,
            device_map={"model": "cpu", "lm_head": "disk"},
            offload_folder=tmp_path / "offload",
            weight_cache=cache,
        )
