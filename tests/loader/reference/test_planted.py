"""One wrong bit in any kind of tensor, of any family, quantized in any way, is found and named: on disk, in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import expert_models
from tests.support.checkpoints import tiny_llama
from tests.support.execution import load
from tests.support.quantized import bits, config_of, tensors_of, write
from tests.support.quantized_cases import CASES
from tests.support.written import write as written
from weightcached.client import attach
from weightcached.client.verify import against_disk
from weightcached.protocol.config import build_config
from weightcached.protocol.text import folded

DENSE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "pad_token_id": 0,
}
WRITTEN = {
    "GemmaForCausalLM": DENSE,
    "Gemma2ForCausalLM": DENSE,
    "Gemma3ForCausalLM": DENSE,
    "GPT2LMHeadModel": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 24, "vocab_size": 100},
    "MistralForCausalLM": DENSE,
    "Olmo2ForCausalLM": DENSE,
    "Phi3ForCausalLM": DENSE,
    "Qwen2ForCausalLM": DENSE,
    "Qwen3ForCausalLM": DENSE,
    "BertModel": DENSE,
    "BertForMaskedLM": DENSE,
    "BertForSequenceClassification": DENSE,
    "BertForTokenClassification": DENSE,
}
METHODS = ("fp8", "fp8-tensor", "fp8-block=16x8", "int8", "int4=8", "int4-asym=8")


def mxfp4(directory: Path) -> Path:
    config = expert_models.config_of("gpt_oss", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    tensors = {}
    for name, shape in expert_models.shapes_of(config).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            tensors[f"{name}_blocks"] = bits(f"{name}_blocks", (experts, outputs, inputs // 32, 16), "U8")
            tensors[f"{name}_scales"] = bits(f"{name}_scales", (experts, outputs, inputs // 32), "U8")
        else:
            tensors[name] = bits(name, shape, "BF16")
    return write(directory, tensors, config)


def quantized(directory: Path, case: str, **overrides: Any) -> Path:
    """With scales for the KV cache where engines take some."""
    quantization, scheme = CASES[case]
    config = config_of(quantization, **{"num_hidden_layers": 1, **overrides})
    tensors = tensors_of(config, scheme)
    if quantization["quant_method"] in ("fp8", "compressed-tensors"):
        for kind in ("k_proj.k_scale", "v_scale"):
            name = f"model.layers.0.self_attn.{kind}"
            tensors[name] = bits(name, (), "F32")
    return write(directory, tensors, config)


def models(directory: Path, name: str) -> Path:
    if name in expert_models.CONFIGS:
        return expert_models.write(directory, expert_models.config_of(name))
    if name in WRITTEN:
        return written(directory, name, WRITTEN[name])
    if name.startswith("experts, "):
        case = name.removeprefix("experts, ")
        return quantized(directory, case, architecture="MixtralForCausalLM", num_local_experts=3)
    return mxfp4(directory) if name == "mxfp4" else quantized(directory, name)


MODELS = (*expert_models.CONFIGS, *WRITTEN, *CASES, "mxfp4", *(f"experts, {case}" for case in ("fp8, blocks", "awq")))
QUANTIZED_ONLINE = [("mixtral", method) for method in METHODS] + [("GPT2LMHeadModel", method) for method in METHODS]


def one_of_each_kind(names: Iterator[str] | list[str]) -> list[str]:
    """Those alike but for numbers are of one kind; the last of each."""
    return list({folded(name): name for name in sorted(names)}.values())


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """The same but for the sign of its largest value."""
    changed = tensor.clone()
    at = int(tensor.flatten().to(torch.float64).abs().argmax())
    changed.view(-1).view(torch.uint8)[(at + 1) * tensor.element_size() - 1] ^= 0x80
    return changed


def made_of(directory: Path, options: dict[str, Any]) -> dict[str, set[str]]:
    """Tensor → the parameters that the loader says it makes of it."""
    made: dict[str, set[str]] = {}
    plan = load(directory, **options).prepared.plan
    for parameter in plan.parameters:
        sources = {copy.tensor.name for copy in parameter.copies}
        others = {parameter.alias_of, parameter.produced_by}
        sources |= {copy.tensor.name for one in plan.parameters if one.name in others for copy in one.copies}
        for name in sources:
            made.setdefault(name, set()).add(parameter.name)
    return made


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in MODELS),
        *((name, {"quantization": method}) for name, method in QUANTIZED_ONLINE),
        ("deepseek_v3", {"ep_size": 2, "ep_rank": 1, "pp_size": 2, "pp_rank": 1}),
        ("gpt_oss", {"tp_size": 2, "tp_rank": 1}),
    ],
    ids=str,
)
def test_a_wrong_bit_on_disk_is_found_and_named(tmp_path, name, options):
    directory = models(tmp_path, name)
    options = {"layout": "fused", "tp_size": 1, "tp_rank": 0, **options}
    made, config = made_of(directory, options), build_config(directory, **options)
    tensors = load_file(directory / "model.safetensors")
    with attach(directory, mode="off", **options) as weights:
        # The files are changed one after the other: what is loaded must not be read again.
        assert {one.verdict for one in against_disk(weights, directory, config)} == {"equal"}
        for tensor in one_of_each_kind(list(made)):
            save_file({**tensors, tensor: flipped(tensors[tensor])}, directory / "model.safetensors")
            found = {one.name: one.verdict for one in against_disk(weights, directory, config)}
            differing = {parameter for parameter, verdict in found.items() if verdict == "differs"}
            assert set(found.values()) <= {"equal", "differs"}, tensor
            if options.get("tp_size") == 1 and "quantization" not in options:
                assert differing == made[tensor], tensor
            assert differing <= made[tensor], tensor
            assert differing or options["tp_size"] > 1, tensor


def test_a_wrong_bit_in_memory_is_found_and_named(tmp_path):
    """Of each kind of parameter, integers and scales."""
    directory = tiny_llama(tmp_path)
    options: dict[str, Any] = {"layout": "fused", "tp_size": 1, "tp_rank": 0, "quantization": "int4-asym=8"}
    config = build_config(directory, **options)
    for name in one_of_each_kind(list(load(directory, **options).rows)):
        with attach(directory, mode="off", **options) as weights:
            weights[name].copy_(flipped(weights[name]))
            assert [one.name for one in against_disk(weights, directory, config) if one.verdict != "equal"] == [name]
