"""GPT-2's table against plain torch: matrices are turned, and names may lack the prefix ``transformer.``."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.execution import load
from tests.support.plain import Share, require_every_rank, tensors_of
from tests.support.written import write
from weightcached.protocol.errors import MissingTensor

SIZES = {"n_embd": 32, "n_head": 8, "n_layer": 2, "n_positions": 24, "vocab_size": 200}
TIED = {"lm_head.weight": "transformer.wte.weight"}


def reference(tensors, rank: Share):
    made = {}
    for stored, tensor in tensors.items():
        name = stored if stored.startswith("transformer.") else f"transformer.{stored}"
        at, _, ending = name.rpartition(".")
        turned = tensor.t() if ending == "weight" and tensor.ndim == 2 else tensor
        if at.endswith("c_attn"):
            made[name] = rank.qkv(*turned.split(32), kv_heads=8)
        elif at.endswith("c_fc"):
            made[name] = rank.rows(turned)
        elif at.endswith("c_proj"):
            made[name] = rank.columns(turned) if ending == "weight" else tensor
        elif at.endswith("wte"):
            made[name] = rank.vocabulary(tensor)
        else:
            made[name] = tensor
    return made


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("inner", [None, 48])
def test_every_rank_of_gpt2(tmp_path, size, inner):
    directory = write(tmp_path, "GPT2LMHeadModel", {**SIZES, "n_inner": inner})
    require_every_rank(directory, reference, size=size, aliases=TIED)


def test_names_without_their_prefix_and_masks_that_nobody_needs(tmp_path):
    """How the oldest checkpoints are: saved from the model without its head, buffers and all."""
    directory = write(tmp_path, "GPT2LMHeadModel", SIZES)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(directory).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24) for layer in range(2)}
    save_file({**tensors, **masks}, directory / "model.safetensors")

    def without_masks(tensors, rank):
        return reference({name: tensor for name, tensor in tensors.items() if name not in masks}, rank)

    require_every_rank(directory, without_masks, size=2, aliases=TIED)
    accounting = load(directory, layout="fused", tp_size=1, tp_rank=0).prepared.plan.accounting
    assert accounting.ignored.keys() == masks.keys()
    assert accounting.loaded == tensors.keys()


def test_what_is_missing_is_called_as_the_files_would(tmp_path):
    directory = write(tmp_path, "GPT2LMHeadModel", SIZES)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(directory).items()}
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "wpe.weight"}, directory / "model.safetensors"
    )
    with pytest.raises(MissingTensor) as caught:
        load(directory, layout="fused", tp_size=1, tp_rank=0)
    assert caught.value.expected == "wpe.weight"


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"quantization": "fp8"}], ids=str)
def test_what_is_done_to_values_is_done_to_the_turned_ones(tmp_path, options):
    """As to a checkpoint that had them ``[out, in]``: here, what a load without the option holds."""
    directory = write(tmp_path, "GPT2LMHeadModel", SIZES)
    plain = load(directory, layout="fused", tp_size=2, tp_rank=1)
    made = load(directory, layout="fused", tp_size=2, tp_rank=1, **options)
    name = "transformer.h.1.mlp.c_fc.weight"
    values = torch.from_numpy(plain.array(name).astype(np.int16)).view(torch.bfloat16).float()
    if "dtype" in options:
        assert made.array(name).tobytes() == values.numpy().tobytes()
        return
    scale = torch.from_numpy(made.array(f"{name}_scale").copy())
    weight = torch.from_numpy(made.array(name).copy()).view(torch.float8_e4m3fn).float() * scale
    assert torch.allclose(weight, values, rtol=2**-4, atol=float(scale.max()) * 2**-10)


def test_config_json_of_the_oldest_checkpoint_has_all_sizes():
    """The keys of the hub's ``gpt2``, written long before the class defaults of today."""
    config = json.loads(
        '{"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}'
    )
    from weightcached.loader.architectures.gpt2 import GPT2

    model = GPT2.shape_of(config)
    assert [model.size(size) for size in ("hidden", "intermediate", "kv_heads", "head", "position_table")] == [
        768,
        3072,
        12,
        64,
        1024,
    ]
    assert model.switch("tie_word_embeddings")
