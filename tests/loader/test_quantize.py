"""Quantization in the pipeline: this rank's fused shard, whatever the method, the slabs, the threads or the stack."""

import json

import numpy as np
import pytest
import xxhash

from tests.support import expert_models, naive
from tests.support.checkpoints import RawTensor, raw_tensor, tiny_llama, write_checkpoint, write_safetensors
from tests.support.execution import load, resident, segment_of
from tests.support.resources import nothing_left_behind
from weightcached.loader import pipeline
from weightcached.loader.accounting import account
from weightcached.loader.boxes import Box
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.execute import execute
from weightcached.loader.layout import place
from weightcached.loader.planned import Copy, LoadPlan, PlannedParameter
from weightcached.loader.quantizers import quantizer
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import CheckpointError
from weightcached.protocol.quantization import Quantization

# A block that fits nothing: rows and columns are left over everywhere.
METHODS = ("fp8", "fp8-tensor", "fp8-block=20x24", "int8", "int4=8", "int4-asym=8")


def fused_in_bf16(directory, rank):
    """Parameter name → this rank's fused bf16 values as float32, unquantized."""
    outcome = load(directory, layout="fused", tp_size=2, tp_rank=rank)
    return {name: (outcome.array(name).astype(np.uint32) << 16).view(np.float32) for name in outcome.rows}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_the_pipeline_quantizes_this_ranks_fused_shard(tmp_path, method, rank):
    directory = tiny_llama(tmp_path, num_hidden_layers=1, vocab_size=70, tie_word_embeddings=True)
    outcome = load(directory, layout="fused", tp_size=2, tp_rank=rank, quantization=method)
    wanted = naive.execute(outcome.prepared.plan, directory)
    assert outcome.data == {name: array.tobytes() for name, array in wanted.items()}
    assert outcome.rows["lm_head.weight"].alias_of == "model.embed_tokens.weight"


DECODED = {
    "fp8": lambda of, name: e4m3(of(name)) * of(f"{name}_scale"),
    "fp8-tensor": lambda of, name: e4m3(of(name)) * of(f"{name}_scale"),
    "fp8-block=16x16": lambda of, name: e4m3(of(name)) * of(f"{name}_scale_inv").repeat(16, 0).repeat(16, 1),
    "int8": lambda of, name: of(name) * of(f"{name}_scale"),
    "int4=8": lambda of, name: (nibbles(of(f"{name}_packed")) - 8) * bf16(of(f"{name}_scale")).repeat(8, 1),
    "int4-asym=8": lambda of, name: (
        (nibbles(of(f"{name}_packed")) - nibbles(of(f"{name}_zero_point").T).T.repeat(8, 1))
        * bf16(of(f"{name}_scale")).repeat(8, 1)
    ),
}


def e4m3(bits):
    exponent, mantissa = (bits >> 3).astype(np.int32) & 15, bits & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(bits & 0x80, -value, value)


def nibbles(words):
    return ((words[:, :, None] >> (4 * np.arange(8))) & 15).reshape(len(words), -1)


def bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("method", DECODED)
def test_an_engine_that_takes_the_parameters_apart_finds_the_weights(tmp_path, method):
    """By the names, shapes and order of bits that engines expect, and by nothing else of ours."""
    directory = tiny_llama(tmp_path, num_hidden_layers=1, intermediate_size=64)
    plain = fused_in_bf16(directory, 1)
    outcome = load(directory, layout="fused", tp_size=2, tp_rank=1, quantization=method)
    for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        name = f"model.layers.0.{part}.weight"
        values = plain[name]
        error = np.abs(DECODED[method](outcome.array, name) - values)
        steps = 15 if method.startswith("int4") else 127
        assert 0 < error.max() <= np.abs(values).max() * (2**-4 if method.startswith("fp8") else 1.2 / steps)
        if method.startswith("int4"):
            assert outcome.array(f"{name}_shape").tolist() == list(values.shape)


@pytest.mark.parametrize("code", ["F16", "F32", "F64"])
@pytest.mark.parametrize("method", METHODS)
def test_other_source_dtypes_are_quantized_from_their_own_values(tmp_path, method, code):
    directory = tiny_llama(tmp_path, code=code, num_hidden_layers=1)
    outcome = load(directory, layout="fused", tp_size=1, tp_rank=0, quantization=method, dtype="bfloat16")
    wanted = naive.execute(outcome.prepared.plan, directory)
    assert outcome.data == {name: array.tobytes() for name, array in wanted.items()}
    if method == "int4=8":
        assert outcome.rows["model.layers.0.mlp.down_proj.weight_scale"].dtype == "bfloat16"


def test_scales_of_int4_have_the_weights_dtype_and_never_float64(tmp_path):
    for code, dtype in (("F16", "float16"), ("F32", "float32"), ("F64", "float32")):
        outcome = load(
            tiny_llama(tmp_path / code, code=code, num_hidden_layers=1),
            layout="fused",
            tp_size=1,
            tp_rank=0,
            quantization="int4=8",
        )
        assert outcome.rows["model.layers.0.mlp.down_proj.weight_scale"].dtype == dtype


@pytest.mark.parametrize("method", METHODS)
def test_slabs_and_threads_change_no_byte(tmp_path, method):
    directory = tiny_llama(tmp_path, intermediate_size=80)
    config = build_config(directory, layout="fused", tp_size=2, tp_rank=1, quantization=method)
    made = []
    with open_checkpoint(directory) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config)
        for slab_nbytes, threads in ((1, 4), (300, 3), (700, 1), (1 << 20, 1), (1, 1)):
            with segment_of(prepared.placement.nbytes) as segment:
                executed = execute(
                    prepared.placement, checkpoint.files, segment, slab_nbytes=slab_nbytes, threads=threads
                )
                made.append((resident(segment, prepared.placement), executed.digests))
    assert all(one == made[0] for one in made[1:])


@pytest.mark.parametrize("method", METHODS)
def test_each_expert_of_a_stack_is_quantized_on_its_own(tmp_path, method):
    """Experts of different size, so that a scale of another's would show; some padding; parts that are strided."""
    experts, outputs, inputs = 5, 27, 48
    tensors = {}
    for n in range(experts):
        bits = np.frombuffer(raw_tensor(f"e{n}", (outputs - n % 2, inputs + 8)).data, np.uint16)
        tensors[f"e{n}"] = RawTensor("BF16", (outputs - n % 2, inputs + 8), (bits + 128 * n).tobytes())
    directory = write_checkpoint(tmp_path, {"architectures": ["Any"]}, {"model.safetensors": tensors})
    transform = quantizer("w13_weight", (experts, outputs, inputs), Quantization.named(method), dtype="bfloat16")
    first, *others = transform.products
    made = []
    with open_checkpoint(directory) as checkpoint:
        copies = tuple(
            Copy(
                checkpoint.tensors[f"e{n}"],
                Box((0, 8 * (n % 2)), (outputs - n % 2, inputs)),
                Box((n, 0, 0), (1, outputs - n % 2, inputs)),
            )
            for n in range(experts)
        )
        zeros = tuple(Box((n, outputs - 1, 0), (1, 1, inputs)) for n in range(experts) if n % 2)
        weight = PlannedParameter(first.name, first.shape, first.dtype, "bfloat16", copies, zeros, transform)
        products = [
            PlannedParameter(one.name, one.shape, one.dtype, None, (), produced_by=first.name) for one in others
        ]
        config = build_config(directory, layout="hf", tp_size=1, tp_rank=0)
        plan = LoadPlan(config, (weight, *products), account(expected=(), present=(), ignored={}))
        placement = place(plan)
        for slab_nbytes, threads in ((1, 4), (1000, 2), (1 << 20, 4)):
            with segment_of(placement.nbytes) as segment:
                executed = execute(placement, checkpoint.files, segment, slab_nbytes=slab_nbytes, threads=threads)
                made.append(resident(segment, placement))
                assert executed.digests == {name: xxhash.xxh3_128(data).digest() for name, data in made[-1].items()}
    wanted = {name: array.tobytes() for name, array in naive.execute(plan, directory).items()}
    assert len(wanted) == len(transform.products)
    assert all(one == wanted for one in made)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_are_quantized_too(tmp_path, family, method):
    """Stacked while they are loaded, and stacked and transposed on disk."""
    directory = expert_models.write(tmp_path, expert_models.config_of(family, num_hidden_layers=1))
    outcome = load(directory, layout="fused", tp_size=2, tp_rank=1, quantization=method)
    wanted = naive.execute(outcome.prepared.plan, directory)
    assert outcome.data == {name: array.tobytes() for name, array in wanted.items()}
    made = {name.rsplit(".", 1)[1]: row.shape for name, row in outcome.rows.items() if "experts.w" in name}
    quantized = Quantization.named(method)
    for name, shape in (("w13_weight", (5, 48, 32)), ("w2_weight", (5, 32, 24))):
        for one in quantizer(name, shape, quantized, dtype="bfloat16").products:
            assert made[one.name] == one.shape


def spoil(directory, name, values):
    """Write other values into one tensor of a checkpoint of F32."""
    path = directory / "model.safetensors"
    header = json.loads(path.read_bytes()[8:].split(b"}}")[0] + b"}}")
    tensors = {one: raw_tensor(one, entry["shape"], "F32") for one, entry in header.items() if one != "__metadata__"}
    data = np.frombuffer(tensors[name].data, np.float32).reshape(tensors[name].shape).copy()
    for index, value in values.items():
        data[index] = value
    tensors[name] = RawTensor("F32", data.shape, data.tobytes())
    write_safetensors(path, tensors)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_is_refused_by_name(tmp_path, method, bad):
    directory = tiny_llama(tmp_path, code="F32", num_hidden_layers=1)
    spoiled = "model.layers.0.self_attn.k_proj.weight"
    spoil(directory, spoiled, {(5, 3): bad})
    with nothing_left_behind(), pytest.raises(CheckpointError, match="not finite") as caught:
        load(directory, layout="fused", tp_size=1, tp_rank=0, quantization=method)
    assert spoiled in caught.value.message
    assert "row 37 of model.layers.0.self_attn.qkv_proj.weight" in str(caught.value.where)  # 32 rows of q come before
    load(directory, layout="fused", tp_size=1, tp_rank=0)  # as they are, they may be loaded


def test_values_too_large_for_their_scales_are_refused_by_name(tmp_path):
    directory = tiny_llama(tmp_path, code="F32", num_hidden_layers=1)
    spoiled = "model.layers.0.mlp.down_proj.weight"
    spoil(directory, spoiled, {(7, 8): -1e30})
    for dtype, fits in (("float16", False), ("bfloat16", True)):
        options = {"layout": "fused", "tp_size": 1, "tp_rank": 0, "quantization": "int4=8", "dtype": dtype}
        if fits:
            load(directory, **options)
            continue
        with pytest.raises(CheckpointError, match="too large") as caught:
            load(directory, **options)
        assert spoiled in caught.value.message
        assert caught.value.where == f"row 7 of {spoiled}_packed"


def test_a_matrix_with_one_scale_is_read_once(tmp_path):
    directory = tiny_llama(tmp_path, hidden_size=64)
    for rank in range(2):
        figures = load(directory, layout="fused", tp_size=2, tp_rank=rank, quantization="fp8-tensor").loaded.figures
        assert figures.traffic["column"].read == figures.traffic["column"].kept == figures.requested["column"] > 0
