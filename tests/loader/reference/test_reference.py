"""The naive reference by itself: it makes what vLLM's loader made and what ours makes, and shares no code with ours."""

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import expert_models
from tests.support.checkpoints import ORACLE, ORACLE_CASES, make_checkpoint, tiny_llama
from tests.support.execution import load
from tests.support.referenced import raw, require_as_the_reference
from tests.support.written import write
from weightcached.loader.reference import NotCompared, NotOnDisk, Reference, reference
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import CheckpointError


@pytest.mark.parametrize("name", ORACLE_CASES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_is_what_the_engine_holds(tmp_path, name, size):
    directory = make_checkpoint(tmp_path, name)
    listed = json.loads((ORACLE / name / f"tp{size}.json").read_text())
    for rank in range(size):
        config = build_config(directory, layout="fused", tp_size=size, tp_rank=rank)
        with Reference(directory, config) as made:
            for parameter, (dtype, shape, digest) in listed[str(rank)]["parameters"].items():
                tensor = made.parameter(parameter)
                assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape)
                assert hashlib.sha256(raw(tensor)).hexdigest()[:16] == digest, parameter
            for alias, target in listed[str(rank)]["aliases"].items():
                assert torch.equal(made.parameter(alias), made.parameter(target))
            assert not list(made.missing([*listed[str(rank)]["parameters"], *listed[str(rank)]["aliases"]]))


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"layout": "hf"}, {}),
        ({"layout": "hf", "dtype": "float32"}, {"shards": 3}),
        ({"layout": "fused", "tp_size": 8}, {"num_attention_heads": 8, "head_dim": 4, "intermediate_size": 64}),
        ({"layout": "fused", "tp_size": 2, "dtype": "float16"}, {"vocab_size": 70, "tie_word_embeddings": True}),
        ({"layout": "fused", "tp_size": 2, "quantization": "fp8"}, {"attention_bias": True, "mlp_bias": True}),
        ({"layout": "fused", "tp_size": 1, "quantization": "fp8"}, {"architecture": "Qwen2ForCausalLM", "code": "F32"}),
    ],
)
def test_the_last_rank_is_what_the_loader_makes(tmp_path, options, model):
    """Key/value heads on more ranks than there are, padding, ties, casts, biases, fp8: byte by byte."""
    size = options.get("tp_size", 1)
    require_as_the_reference(tiny_llama(tmp_path, **model), **{**options, "tp_rank": size - 1})


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 200,
}


DENSE = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM")


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("architecture", DENSE)
def test_other_families(tmp_path, architecture, size):
    more = {"pad_token_id": 0} if architecture == "Phi3ForCausalLM" else {}
    directory = write(tmp_path, architecture, {**SIZES, **more})
    require_as_the_reference(directory, tp_size=size, tp_rank=size - 1)


def test_what_it_has_no_rule_for_it_does_not_guess(tmp_path, monkeypatch):
    directory = tiny_llama(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    strange = ("model.layers.0.self_attn.rotary.weight", "model.layers.0.self_attn.o_proj.weight_zeros")
    save_file({**tensors, **{name: torch.ones(2) for name in strange}}, directory / "model.safetensors")
    with Reference(directory, build_config(directory, layout="fused", tp_size=1, tp_rank=0)) as made:
        for name in strange:
            with pytest.raises(NotCompared, match="no rule"):
                made.parameter(name)
        with pytest.raises(NotOnDisk, match=r"model\.layers\.9\.mlp\.gate_up_proj\.weight"):
            made.parameter("model.layers.9.mlp.gate_up_proj.weight")
        monkeypatch.setattr(reference, "ARCHITECTURES", frozenset())
        with pytest.raises(NotCompared, match="LlamaForCausalLM"):
            made.parameter("model.norm.weight")


EXPERTS = ("mlp.experts.routed_experts.w13_weight", "mlp.experts.routed_experts.w2_weight")


@pytest.mark.parametrize(
    "lost", ["self_attn.k_proj", "mlp.up_proj", "mlp.experts.3.gate_proj", "mlp.experts.5.down_proj", "mlp.experts.2"]
)
def test_a_part_or_an_expert_that_no_file_has_is_named(tmp_path, lost):
    directory = expert_models.write(tmp_path, expert_models.config_of("qwen2_moe"))
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f".{lost}." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, directory / "model.safetensors")
    with Reference(directory, build_config(directory, layout="fused", tp_size=1, tp_rank=0)) as made:
        failing = []
        for name in ("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight", *EXPERTS):
            for layer in (0, 1):
                try:
                    made.parameter(f"model.layers.{layer}.{name}")
                except NotOnDisk:
                    failing.append(name)
    assert failing


def test_what_a_rank_should_have_and_lacks_is_named(tmp_path):
    directory = expert_models.write(tmp_path, expert_models.config_of("deepseek_v3", tie_word_embeddings=True))
    options: dict[str, Any] = {"layout": "fused", "tp_size": 1, "tp_rank": 0, "quantization": "fp8"}
    for stage in range(3):
        at = {**options, "pp_size": 3, "pp_rank": stage}
        names = set(load(directory, **at).rows)
        with Reference(directory, build_config(directory, **at)) as made:
            assert {name for name, _ in made.missing([])} == names
            for name in names:
                assert [lacking for lacking, _ in made.missing(names - {name})] == [name]


def test_files_that_cannot_be_opened_are_our_error(tmp_path):
    directory = tiny_llama(tmp_path)
    (directory / "model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="reference cannot open"):
        Reference(directory, build_config(directory, layout="hf", tp_size=1, tp_rank=0))


def test_it_shares_no_code_with_the_loader():
    ours = set()
    for path in Path(reference.__file__).parent.glob("*.py"):
        modules = (node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
        ours |= {module for module in modules if module is not None and module.startswith("weightcached.")}
    outside = {module for module in ours if not module.startswith("weightcached.loader.reference")}
    assert outside == {f"weightcached.protocol.{module}" for module in ("config", "errors", "quantization")}
