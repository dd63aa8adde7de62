"""vLLM, whole and real, with weights from a daemon: it says what it says with its own loader, and holds none of them.

Engines of one rank run in one process after the other; see `vllm_generate.py`.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from tests.engines import engine
from tests.engines.cases.case import Case
from tests.engines.cases.dense import CASES as DENSE
from tests.engines.cases.dense import LLAMA, stored_as
from tests.engines.cases.experts import CASES as EXPERTS
from tests.engines.conftest import GENERATING
from tests.engines.engine import EngineError
from tests.engines.generating import ended, of_vllm, said, said_by, serving, share_of_memory, started, with_cache
from weightcached.protocol.places import Place

CASES = {case.name: case for case in (*DENSE, *EXPERTS)}
ONE = CASES["llama"]
pytestmark = pytest.mark.timeout(300)  # the first test that needs an engine starts its process

EXPERT_WEIGHTS = (".w13_weight", ".w2_weight")


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "qwen2", "qwen3", "phi3", "gemma2", "gpt2", "mixtral", "qwen3-moe"]
)
def test_an_engine_says_what_it_says_with_its_own_loader_from_memory_that_is_not_its_own(
    generator, checkpoint, tmp_path, name
):
    model = checkpoint(CASES[name])
    _, expected = said_by(generator, of_vllm(model))
    with serving(model, tmp_path / "run") as (daemon,):
        (worker,) = started(generator, with_cache(model, tmp_path / "run"))
        tokens = said(generator)
        (after,) = generator.ask(do="look")["workers"]
        report = daemon.report()
        ended(generator)
    assert tokens == expected
    assert worker["report"]["source"] == "daemon"
    assert worker["report"]["generation"] == report.generation
    assert worker["report"]["place"] == str(daemon.place.socket_path)
    # A CPU's kernels want experts in another order: those are private, and said to be.
    assert all(name.endswith(EXPERT_WEIGHTS) for name in worker["elsewhere"])
    assert bool(worker["elsewhere"]) == ("mixtral" in name or "moe" in name) == bool(worker["report"]["made_anew"])
    assert worker["mapped_nbytes"] == worker["report"]["nbytes_shared"] > 0
    assert (worker["private_nbytes"], after["private_nbytes"]) == (0, 0)
    tied = [["lm_head.weight", "model.embed_tokens.weight"]]
    if name == "llama-tied":
        assert worker["tied"] == tied
    if name == "llama":
        assert worker["tied"] == []


def test_its_caches_are_sized_with_the_weights_counted(generator, checkpoint, tmp_path):
    """vLLM gives its KV cache what a worker does not have resident, and asks the loader what lies elsewhere."""
    model, share = checkpoint(ONE), share_of_memory(2 << 30)
    with serving(model, tmp_path / "run") as (daemon,):
        arguments = with_cache(model, tmp_path / "run", kv_cache_memory_bytes=None, gpu_memory_utilization=share)
        (worker,) = started(generator, arguments)
        ended(generator)
        assert worker["resident_nbytes"] >= daemon.report().resident_nbytes > 0
        assert "map pages" in worker["report"]["seconds"]
        assert worker["external_nbytes"] == daemon.report().resident_nbytes
        assert worker["private_nbytes"] == 0


def test_where_there_is_no_daemon_vllm_loads_by_itself_in_mode_client_alone(generator, checkpoint, tmp_path):
    model = checkpoint(ONE)
    _, expected = said_by(generator, of_vllm(model))
    arguments = with_cache(model, tmp_path / "run", mode="client", packing=False)
    (worker,), tokens = said_by(generator, arguments)
    assert tokens == expected
    assert worker["report"]["source"] == "disk"
    assert worker["external_nbytes"] == 0
    assert f"no daemon's socket at {tmp_path}/run/default/host-tp0of1.sock" in generator.log()
    with pytest.raises(EngineError) as caught:
        started(generator, with_cache(model, tmp_path / "run", mode="require"))
    assert caught.value.code == "daemon_absent"


def test_mode_off_is_vllm_s_own_loader_whether_or_not_there_is_a_daemon(generator, checkpoint, tmp_path):
    model = checkpoint(ONE)
    with serving(model, tmp_path / "run") as (daemon,):
        (worker,), _ = said_by(generator, with_cache(model, tmp_path / "run", mode="off"))
        assert worker["report"] is None
        assert worker["mapped_nbytes"] == 0
        assert daemon.report().attaches == {}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param({"content": True}, "content_mismatch", id="other bytes"),
        pytest.param({"quantization": "int8"}, "config_mismatch", id="quantized by the daemon"),
        pytest.param({"dtype": "float16"}, "config_mismatch", id="of another dtype"),
    ],
)
def test_weights_that_are_not_the_engine_s_are_refused(generator, checkpoint, tmp_path, change, code):
    other = ONE
    if change.pop("content", False):
        other = dataclasses.replace(ONE, name="llama-other", edit=lambda _, tensors: _flip_a_bit(tensors))
    with serving(checkpoint(other), tmp_path / "run", **change), pytest.raises(EngineError) as caught:
        started(generator, with_cache(checkpoint(ONE), tmp_path / "run", mode="client"))
    assert caught.value.code == code


def _flip_a_bit(tensors):
    name = "model.norm.weight"
    data = bytearray(tensors[name].data)
    data[0] ^= 1
    tensors[name] = dataclasses.replace(tensors[name], data=bytes(data))


def test_a_checkpoint_that_vllm_casts_is_had_from_a_daemon_that_casts_it_too(generator, checkpoint, tmp_path):
    model = checkpoint(Case("llama-f32", LLAMA, edit=stored_as("F32", "float32")))
    with serving(model, tmp_path / "run"), pytest.raises(EngineError, match="dtype") as caught:
        started(generator, with_cache(model, tmp_path / "run"))
    assert caught.value.code == "config_mismatch"
    _, expected = said_by(generator, of_vllm(model))
    with serving(model, tmp_path / "cast", dtype="bfloat16"):
        (worker,), tokens = said_by(generator, with_cache(model, tmp_path / "cast"))
    assert tokens == expected
    assert worker["elsewhere"] == []


def test_float32_stays_mapped_too(generator, checkpoint, tmp_path):
    model = checkpoint(Case("llama-f32", LLAMA, edit=stored_as("F32", "float32")))
    _, expected = said_by(generator, of_vllm(model, dtype="float32"))
    with serving(model, tmp_path / "run"):
        (worker,), tokens = said_by(generator, with_cache(model, tmp_path / "run", dtype="float32"))
    assert tokens == expected
    assert (worker["elsewhere"], worker["private_nbytes"]) == ([], 0)


def test_what_vllm_would_quantize_itself_is_refused_by_name(generator, checkpoint, tmp_path):
    model = checkpoint(ONE)
    with serving(model, tmp_path / "run"), pytest.raises(EngineError, match="Fp8") as caught:
        started(generator, with_cache(model, tmp_path / "run", quantization="fp8"))
    assert caught.value.code == "unsupported_model"


def test_an_option_that_is_not_known_stops_the_engine_by_name(generator, checkpoint, tmp_path):
    with pytest.raises(EngineError, match="nmae: unknown, did you mean name") as caught:
        started(generator, with_cache(checkpoint(ONE), tmp_path / "run", options={"nmae": "x"}))
    assert caught.value.code == "invalid_option"


def test_engines_and_daemons_end_each_without_the_others(generator, checkpoint, tmp_path):
    """Two engines on one daemon: one is killed, and starts again; the daemon is killed while the other generates."""
    model = checkpoint(ONE)
    arguments = with_cache(model, tmp_path / "run")
    with serving(model, tmp_path / "run") as (daemon,):
        started(generator, arguments)
        expected = said(generator)
        with engine.running(engine.WHOLE, GENERATING) as first:
            started(first, arguments)
            assert said(first) == expected
            first.kill()
        with engine.running(engine.WHOLE, GENERATING) as again:
            (worker,) = started(again, arguments)
            assert worker["report"]["source"] == "daemon"
            assert said(again) == expected
            assert said(generator) == expected
            again.request(do="say", prompts=[[1, 2, 3]], max_tokens=40)
            daemon.process.kill()
            assert len(again.answer()["tokens"][0]) == 40
            assert said(again) == said(generator) == expected
    ended(generator)


def test_an_engine_with_a_daemon_of_its_own_ends_with_it(checkpoint, tmp_path):
    model = checkpoint(ONE)
    place = Place(tmp_path / "run", "default", "host-tp0of1")
    with engine.running(engine.WHOLE, GENERATING) as owner:
        (worker,) = started(owner, with_cache(model, tmp_path / "run", mode="daemon"))
        assert worker["report"]["source"] == "daemon"
        assert said(owner)
        assert place.socket_path.exists()
    assert not place.socket_path.exists()


def test_a_draft_model_has_a_daemon_of_its_own_name_or_is_vllm_s_business(generator, checkpoint, tmp_path):
    model, run = checkpoint(ONE), tmp_path / "run"
    drafted = {"model": str(model), "num_speculative_tokens": 2, "method": "draft_model"}
    _, expected = said_by(generator, of_vllm(model, speculative_config=drafted))
    with serving(model, run), serving(model, run, name="draft") as (draft,):
        _, tokens = said_by(generator, with_cache(model, run, speculative_config=drafted))
        assert tokens == expected
        assert draft.report().attaches == {}
        _, tokens = said_by(
            generator, with_cache(model, run, options={"draft_name": "draft"}, speculative_config=drafted)
        )
        assert tokens == expected
        assert draft.report().attaches == {"granted": 1}


def test_an_adapter_is_added_to_weights_that_stay_mapped(generator, checkpoint, tmp_path):
    model, adapter = checkpoint(ONE), _lora(tmp_path / "adapter")
    started(generator, of_vllm(model, enable_lora=True, max_lora_rank=8))
    expected = said(generator), said(generator, adapter=adapter)
    ended(generator)
    assert expected[0] != expected[1]
    with serving(model, tmp_path / "run"):
        started(generator, with_cache(model, tmp_path / "run", enable_lora=True, max_lora_rank=8))
        assert (said(generator), said(generator, adapter=adapter)) == expected
        (worker,) = generator.ask(do="look")["workers"]
        ended(generator)
    assert worker["private_nbytes"] == 0
    assert worker["mapped_nbytes"] == worker["report"]["nbytes_shared"]


def _lora(directory):
    """An adapter of rank 8 for the query projections, large enough to be heard."""
    directory.mkdir()
    parts = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        parts[f"{name}.lora_A.weight"] = torch.full((8, 256), 0.5, dtype=torch.bfloat16)
        parts[f"{name}.lora_B.weight"] = torch.linspace(-2, 2, 256 * 8).view(256, 8).to(torch.bfloat16)
    save_file(parts, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return directory
