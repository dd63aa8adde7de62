"""The naive reference by itself: it makes what vLLM's loader made and what ours makes, and shares no code with ours."""

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import ORACLE, ORACLE_CASES, make_checkpoint, tiny_llama
from tests.support.execution import load
from tests.support.written import write
from weightcached.loader import reference
from weightcached.loader.reference import NotCompared, NotOnDisk, Reference
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import CheckpointError


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


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
            assert made.tensors - made.used <= {"lm_head.weight"}  # stored though it is tied


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
    directory = tiny_llama(tmp_path, **model)
    options = {"tp_size": 1, **options}
    options["tp_rank"] = options["tp_size"] - 1
    outcome = load(directory, **options)
    with Reference(directory, build_config(directory, **options)) as made:
        for name, row in outcome.rows.items():
            tensor = made.parameter(name)
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{row.dtype}", row.shape), name
            assert raw(tensor) == outcome.data[name], name
        assert made.used == made.tensors


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 200,
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("architecture", [*reference._GEMMA, "Olmo2ForCausalLM", "Phi3ForCausalLM"])
def test_other_families(tmp_path, architecture, size):
    more = {"pad_token_id": 0} if architecture == "Phi3ForCausalLM" else {}
    directory = write(tmp_path, architecture, {**SIZES, **more})
    options: dict[str, Any] = {"layout": "fused", "tp_size": size, "tp_rank": size - 1}
    outcome = load(directory, **options)
    with Reference(directory, build_config(directory, **options)) as made:
        assert {name: raw(made.parameter(name)) for name in outcome.rows} == dict(outcome.data)


def test_what_it_has_no_rule_for_it_does_not_guess(tmp_path, monkeypatch):
    directory = tiny_llama(tmp_path)
    with Reference(directory, build_config(directory, layout="fused", tp_size=1, tp_rank=0)) as made:
        for name in ("model.layers.0.self_attn.rotary.weight", "model.norm.weight_packed"):
            with pytest.raises(NotCompared, match="no rule"):
                made.parameter(name)
        with pytest.raises(NotOnDisk, match=r"model\.layers\.9\.mlp\.gate_proj\.weight"):
            made.parameter("model.layers.9.mlp.gate_up_proj.weight")
        monkeypatch.setattr(reference, "ARCHITECTURES", frozenset())
        with pytest.raises(NotCompared, match="LlamaForCausalLM"):
            made.parameter("model.norm.weight")


def test_files_that_cannot_be_opened_are_our_error(tmp_path):
    directory = tiny_llama(tmp_path)
    (directory / "model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="reference cannot open"):
        Reference(directory, build_config(directory, layout="hf", tp_size=1, tp_rank=0))


def test_it_shares_no_code_with_the_loader():
    tree = ast.parse(Path(reference.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    ours = {module for module in modules if module.startswith("weightcached.")}
    assert ours == {"weightcached.protocol.config", "weightcached.protocol.errors"}
