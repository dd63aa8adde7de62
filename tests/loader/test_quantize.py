"""Online fp8: exact values by a table of all e4m3 numbers, the stated bound, and the pipeline around it."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.support import naive
from tests.support.checkpoints import RawTensor, raw_tensor, tiny_llama, write_safetensors
from tests.support.execution import load, resident, segment_of
from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.execute import execute
from weightcached.loader.quantize import FP8_MAX, FP8_SCALE_MIN, quantize_rows
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import CheckpointError


def e4m3_values() -> np.ndarray:
    """Bits 0x00 to 0x7E → value, by the format's definition: 4 exponent bits with bias 7, 3 mantissa bits."""
    bits = np.arange(0x7F)
    exponent, mantissa = bits >> 3, bits & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


VALUES = e4m3_values()
assert VALUES[-1] == FP8_MAX


def reference(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales in float32 arithmetic, elements by a search for the nearest e4m3 number, ties to the even one."""
    largest = np.abs(values).max(axis=1, keepdims=True).astype(np.float32)
    scale = np.maximum(largest / np.float32(448), np.float32(FP8_SCALE_MIN))
    scaled = np.clip(values.astype(np.float32) / scale, -448, 448)
    magnitude = np.abs(scaled).astype(np.float64)
    above = np.searchsorted(VALUES, magnitude).clip(1, len(VALUES) - 1)
    low, high = magnitude - VALUES[above - 1], VALUES[above] - magnitude
    bits = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (bits | (np.signbit(scaled) << 7)).astype(np.uint8), scale


def quantized(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights, scale = quantize_rows(torch.from_numpy(values))
    return weights.view(torch.uint8).numpy(), scale.numpy()


matrices = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 40)),
    elements=st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-1, 1, width=32),
)


@settings(deadline=None)
@given(matrices)
def test_every_element_is_the_nearest_e4m3_number(values):
    weights, scale = quantized(values)
    wanted_weights, wanted_scale = reference(values)
    assert (scale == wanted_scale).all()
    assert (weights == wanted_weights).all()


@settings(deadline=None)
@given(matrices)
def test_the_error_is_within_the_stated_bound(values):
    weights, scale = quantized(values)
    back = VALUES[weights & 0x7F] * np.where(weights & 0x80, -1.0, 1.0) * scale.astype(np.float64)
    error = np.abs(back - values.astype(np.float64))
    assert (error <= np.maximum(np.abs(values, dtype=np.float64) * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)).all()


def test_every_e4m3_number_is_its_own_quantization():
    row = np.concatenate([VALUES, -VALUES]).astype(np.float32)[None, :]
    weights, scale = quantized(row)
    assert scale == [[1.0]]
    assert (weights == np.concatenate([np.arange(0x7F), np.arange(0x7F) | 0x80])).all()


def test_a_row_of_zeros_has_the_smallest_scale():
    weights, scale = quantized(np.zeros((2, 5), np.float32))
    assert (weights == 0).all()
    assert (scale == np.float32(FP8_SCALE_MIN)).all()


def fused_in_bf16(directory, rank):
    """Parameter name → this rank's fused bf16 values as float32, unquantized."""
    outcome = load(directory, layout="fused", tp_size=2, tp_rank=rank)
    return {name: (outcome.array(name).astype(np.uint32) << 16).view(np.float32) for name in outcome.rows}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_pipeline_quantizes_this_ranks_fused_shard(tmp_path, rank):
    directory = tiny_llama(tmp_path, num_hidden_layers=1)
    plain = fused_in_bf16(directory, rank)
    outcome = load(directory, layout="fused", tp_size=2, tp_rank=rank, quantization="fp8")
    scales = [name for name in outcome.rows if name.endswith("_scale")]
    assert len(scales) == 4
    for scale in scales:
        weight = scale.removesuffix("_scale")
        wanted_weight, wanted_scale = reference(plain[weight])
        assert outcome.rows[weight].dtype == "float8_e4m3fn"
        assert outcome.rows[scale].dtype == "float32"
        assert outcome.rows[scale].shape == (plain[weight].shape[0], 1)
        assert (outcome.array(weight) == wanted_weight).all()
        assert (outcome.array(scale) == wanted_scale).all()
    for name, values in plain.items():
        if f"{name}_scale" not in scales:
            assert ((outcome.array(name).astype(np.uint32) << 16).view(np.float32) == values).all()


@pytest.mark.parametrize("code", ["F16", "F32", "F64"])
def test_other_source_dtypes_are_quantized_from_their_own_values(tmp_path, code):
    directory = tiny_llama(tmp_path, code=code, num_hidden_layers=1)
    outcome = load(directory, layout="fused", tp_size=1, tp_rank=0, quantization="fp8")
    name = "model.layers.0.self_attn.o_proj.weight"
    raw = raw_tensor(name, (32, 32), code)
    values = np.frombuffer(raw.data, {"F16": np.float16, "F32": np.float32, "F64": np.float64}[code]).reshape(32, 32)
    wanted_weight, wanted_scale = reference(values)
    assert (outcome.array(name) == wanted_weight).all()
    assert (outcome.array(f"{name}_scale") == wanted_scale).all()


def test_slabs_and_threads_change_no_byte(tmp_path):
    directory = tiny_llama(tmp_path)
    config = build_config(directory, layout="fused", tp_size=2, tp_rank=1, quantization="fp8")
    made = []
    with open_checkpoint(directory) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config)
        for slab_nbytes, threads in ((1, 4), (300, 3), (1 << 20, 1)):
            with segment_of(prepared.placement.segment_nbytes) as segment:
                executed = execute(
                    prepared.placement, checkpoint.files, segment, slab_nbytes=slab_nbytes, threads=threads
                )
                made.append((resident(segment, prepared.placement), executed.digests))
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(tmp_path, bad):
    directory = tiny_llama(tmp_path, code="F32", num_hidden_layers=1)
    spoiled = "model.layers.0.self_attn.k_proj.weight"
    header = json.loads((directory / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    tensors = {
        name: raw_tensor(name, entry["shape"], "F32") for name, entry in header.items() if name != "__metadata__"
    }
    values = np.frombuffer(tensors[spoiled].data, np.float32).reshape(tensors[spoiled].shape).copy()
    values[5, 3] = bad
    tensors[spoiled] = RawTensor("F32", values.shape, values.tobytes())
    write_safetensors(directory / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="not finite") as caught:
        load(directory, layout="fused", tp_size=1, tp_rank=0, quantization="fp8")
    assert spoiled in caught.value.message
    assert caught.value.where == "row 37 of model.layers.0.self_attn.qkv_proj.weight"  # 32 rows of q come before
    load(directory, layout="fused", tp_size=1, tp_rank=0)  # as they are, they may be loaded


def test_padding_and_aliases_stay_as_they_were(tmp_path):
    directory = tiny_llama(tmp_path, vocab_size=70, tie_word_embeddings=True)
    outcome = load(directory, layout="fused", tp_size=1, tp_rank=0, quantization="fp8")
    assert outcome.rows["lm_head.weight"].alias_of == "model.embed_tokens.weight"
    wanted = naive.execute(outcome.prepared.plan, directory)
    assert {name: outcome.data[name] for name in wanted} == {name: a.tobytes() for name, a in wanted.items()}
