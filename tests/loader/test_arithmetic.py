"""Quantization's arithmetic: exact values by definitions in numpy, the bounds that are stated, and the same bytes as
compressed-tensors makes. vLLM's are compared in tests/engines.
"""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from weightcached.loader import arithmetic
from weightcached.loader.arithmetic import FP8_BLOCK_LARGEST_MIN, FP8_MAX, FP8_SCALE_MIN

GROUP = 8
SCALE_DTYPES = {
    # dtype → (largest value whose scale it can hold, its smallest positive number)
    torch.float32: (2.0**126, 2.0**-149),
    torch.bfloat16: (2.0**126, 2.0**-133),
    torch.float16: (2.0**17, 2.0**-24),
}


def matrices(largest: float = 2.0**127, columns: int = 40):
    """Up to 20 rows, every kind of finite value among them: zeros, subnormals, huge ones, and rows of one kind."""
    tame = st.floats(-1, 1, width=32)
    tiny = st.floats(-(2.0**-120), 2.0**-120, width=32)
    elements = st.floats(-largest, largest, width=32) | tame | tiny | st.just(0.0)
    shapes = st.tuples(st.integers(1, 20), st.integers(1, columns))
    return st.sampled_from([elements, tame, tiny, st.just(0.0)]).flatmap(
        lambda kind: arrays.arrays(np.float32, shapes, elements=kind)
    )


def grouped(largest: float):
    """The same in whole groups."""
    return matrices(largest, columns=5).map(lambda x: np.tile(x, GROUP).reshape(len(x), -1))


def made(function, x: np.ndarray, *more, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, ...]:
    """What a function of ours makes of ``x``, the quantized values first."""
    columns = x.shape[1] // (8 if dtype == torch.int32 else 1)
    into = torch.empty((len(x), columns), dtype=dtype)
    return into, *function(torch.from_numpy(x.copy()), into, *more)


# fp8


def e4m3_values() -> np.ndarray:
    """Bits 0x00 to 0x7E → value, by the format's definition: 4 exponent bits with bias 7, 3 mantissa bits."""
    bits = np.arange(0x7F)
    exponent, mantissa = bits >> 3, bits & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


VALUES = e4m3_values()
assert VALUES[-1] == FP8_MAX


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest e4m3 number, by search, ties to the even one."""
    magnitude = np.abs(x).astype(np.float64)
    above = np.searchsorted(VALUES, magnitude).clip(1, len(VALUES) - 1)
    low, high = magnitude - VALUES[above - 1], VALUES[above] - magnitude
    bits = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (bits | (np.signbit(x) << 7)).astype(np.uint8)


def bits_of(q: torch.Tensor) -> np.ndarray:
    return q.view(torch.uint8).numpy()


def number(bits: np.ndarray) -> np.ndarray:
    return VALUES[bits & 0x7F] * np.where(bits & 0x80, -1.0, 1.0)


def fp8_bound(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(x, dtype=np.float64) * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)


def per_block(x: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Each element's scale."""
    return scale.repeat(block[0], 0).repeat(block[1], 1)[: x.shape[0], : x.shape[1]]


@settings(deadline=None)
@given(matrices())
def test_fp8_of_channels_is_the_nearest_e4m3_number(x):
    q, scale = made(arithmetic.fp8_channel, x)
    largest = np.abs(x).max(axis=1, keepdims=True)
    wanted = np.maximum(largest / np.float32(448), np.float32(FP8_SCALE_MIN))
    assert (scale.numpy() == wanted).all()
    assert (bits_of(q) == nearest_e4m3(np.clip(x / wanted, -448, 448))).all()
    assert (np.abs(number(bits_of(q)) * wanted.astype(np.float64) - x) <= fp8_bound(x, wanted)).all()


@settings(deadline=None)
@given(matrices())
def test_fp8_of_a_tensor_is_the_nearest_e4m3_number(x):
    largest = arithmetic.largest(torch.from_numpy(x))
    assert largest == np.abs(x).max()
    wanted = np.maximum(np.float32(largest) / np.float32(448), np.float32(FP8_SCALE_MIN))
    q, scale = made(arithmetic.fp8_tensor, x, largest)
    assert scale.shape == (1,)
    assert scale.item() == wanted
    assert (bits_of(q) == nearest_e4m3(np.clip(x * (np.float32(1) / wanted), -448, 448))).all()
    assert (np.abs(number(bits_of(q)) * np.float64(wanted) - x) <= fp8_bound(x, wanted)).all()


@settings(deadline=None)
@given(matrices(), st.tuples(st.integers(1, 23), st.integers(1, 43)))
def test_fp8_of_blocks_is_the_nearest_e4m3_number(x, block):
    q, scale = made(arithmetic.fp8_block, x, block)
    high, wide = block
    wanted = np.array(
        [
            [np.abs(x[row : row + high, column : column + wide]).max() for column in range(0, x.shape[1], wide)]
            for row in range(0, x.shape[0], high)
        ]
    )
    wanted = np.maximum(wanted, np.float32(FP8_BLOCK_LARGEST_MIN)) / np.float32(448)
    assert (scale.numpy() == wanted).all()
    scales = per_block(x, wanted, block)
    assert (bits_of(q) == nearest_e4m3(np.clip(x * (np.float32(1) / scales), -448, 448))).all()
    assert (np.abs(number(bits_of(q)) * scales.astype(np.float64) - x) <= fp8_bound(x, scales)).all()


def test_every_e4m3_number_is_its_own_quantization():
    row = np.concatenate([VALUES, -VALUES]).astype(np.float32)[None, :]
    wanted = np.concatenate([np.arange(0x7F), np.arange(0x7F) | 0x80])
    for q, scale in (
        made(arithmetic.fp8_channel, row),
        made(arithmetic.fp8_tensor, row, 448.0),
        made(arithmetic.fp8_block, row, (1, 300)),
    ):
        assert scale.flatten().tolist() == [1.0]
        assert (bits_of(q) == wanted).all()


# Integers, compared with compressed-tensors


def theirs(x: np.ndarray, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What compressed-tensors makes of ``x`` in float32: int8 values, scales and zero points."""
    values = torch.from_numpy(x)
    groups = values.unflatten(-1, (-1, args.group_size)) if args.group_size else values.unsqueeze(1)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return quantize(values, scale, zero, args, dtype=torch.int8), scale, zero


def error_of(x: np.ndarray, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(distance of each element to what is stored for it, its scale)"""
    per_row = x.shape[1] // scale.shape[1]
    scales = scale.double().numpy().repeat(per_row, 1)
    back = (q.double().numpy() - zero.double().numpy().repeat(per_row, 1)) * scales
    return np.abs(back - x.astype(np.float64)), scales


@settings(deadline=None)
@given(matrices())
def test_int8_is_what_compressed_tensors_makes_and_within_its_bound(x):
    args = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
    wanted, wanted_scale, zero = theirs(x, args)
    q, scale = made(arithmetic.int8_channel, x, dtype=torch.int8)
    assert (q.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (len(x), 1))
    assert torch.equal(q, wanted)
    assert torch.equal(scale, wanted_scale)
    error, scales = error_of(x, q, scale, zero)
    assert (error <= np.where(scales < 2.0**-126, 2.0**-118, scales * (0.5 + 2.0**-15))).all()


@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_is_what_compressed_tensors_makes_and_within_its_bound(dtype, symmetric):
    largest, smallest = SCALE_DTYPES[dtype]
    args = QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=symmetric, scale_dtype=dtype
    )

    @settings(deadline=None)
    @given(grouped(largest))
    def compare(x):
        q, wanted_scale, zero = theirs(x, args)
        pack = arithmetic.int4_group if symmetric else arithmetic.int4_group_asymmetric
        packed, scale, *zeros = made(pack, x, GROUP, dtype, dtype=torch.int32)
        assert scale.dtype == dtype
        assert torch.equal(scale.float(), wanted_scale)
        assert torch.equal(packed, pack_to_int32(q, 4))
        assert [z.tolist() for z in zeros] == ([] if symmetric else [pack_to_int32(zero, 4, packed_dim=0).tolist()])
        error, scales = error_of(x, q, scale, zero)
        assert (error <= scales * (0.5 + 2.0**-4) + 16 * smallest).all()

    compare()


# Whatever the method

METHODS = {
    "fp8_channel": (lambda x: made(arithmetic.fp8_channel, x), 1),
    "fp8_tensor": (lambda x: made(arithmetic.fp8_tensor, x, 4.0), 1),
    "fp8_block": (lambda x: made(arithmetic.fp8_block, x, (4, 24)), 4),
    "int8_channel": (lambda x: made(arithmetic.int8_channel, x, dtype=torch.int8), 1),
    "int4_group": (lambda x: made(arithmetic.int4_group, x, 16, torch.bfloat16, dtype=torch.int32), 1),
    "int4_group_asymmetric": (
        lambda x: made(arithmetic.int4_group_asymmetric, x, 16, torch.bfloat16, dtype=torch.int32),
        8,
    ),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("threads", [1, 4])
def test_no_byte_depends_on_threads_or_on_where_rows_are_cut(name, threads):
    function, together = METHODS[name]
    x = np.random.default_rng(1).standard_normal((90, 4096), np.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = function(x)
        for rows in (together, 3 * together, 64):
            parts = [function(x[first : first + rows]) for first in range(0, len(x), rows)]
            for number, tensor in enumerate(whole):
                if name == "fp8_tensor" and number == 1:
                    continue  # one scale for all
                joined = torch.cat([part[number] for part in parts])
                assert torch.equal(joined.view(torch.uint8), tensor.view(torch.uint8))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_scale(name, bad):
    x = np.ones((9, 48), np.float32)
    x[8, 47] = bad
    if name == "fp8_tensor":
        assert not np.isfinite(arithmetic.largest(torch.from_numpy(x)))
        return
    scale = METHODS[name][0](x)[1]
    assert torch.isfinite(scale[:-1]).all()
    assert not torch.isfinite(scale[-1, -1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [arithmetic.fp8_channel, arithmetic.int8_channel])
def test_scales_are_the_same_whichever_dtype_the_largest_is_looked_for_in(function, dtype):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 33, generator=generator).to(dtype)
    x[0], x[1], x[2], x[3] = x[0].abs(), -x[1].abs(), 0.0, -0.0
    x[4, 7], x[5, 8], x[6, 9], x[7, 9] = np.nan, -np.nan, np.inf, -np.inf
    into = torch.empty(x.shape, dtype=torch.float8_e4m3fn if function is arithmetic.fp8_channel else torch.int8)
    (wanted,) = function(x.float(), into.clone())
    (scale,) = function(x.float(), into, x)
    assert torch.equal(scale.isfinite(), wanted.isfinite())
    assert torch.equal(scale[wanted.isfinite()], wanted[wanted.isfinite()])
    assert (~wanted.isfinite()).sum() == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_largest_is_found_in_any_floating_point(dtype):
    x = torch.linspace(-3, 2, 101, dtype=torch.float64).to(dtype)
    assert arithmetic.largest(x) == 3.0
    assert arithmetic.largest(-x) == 3.0
    assert arithmetic.largest(x[-1:]) == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_largest_of_16_bits_is_the_same_by_bits_and_by_values(dtype):
    """The host looks at bits, a device at values."""
    bits = torch.randint(-(1 << 15), 1 << 15, (64, 257), dtype=torch.int16).view(dtype)
    finite = torch.where(bits.isfinite(), bits, torch.zeros((), dtype=dtype))
    for x in (finite, finite.abs(), -finite.abs(), torch.zeros(3, 4, dtype=dtype)):
        assert arithmetic._largest_by_bits(x).equal(arithmetic._largest_by_values(x))
    for bad in (float("inf"), float("-inf"), float("nan")):
        spoiled = finite.clone()
        spoiled[5, 7] = bad
        for found in (arithmetic._largest_by_bits(spoiled), arithmetic._largest_by_values(spoiled)):
            assert not found[5].isfinite()
            assert found[torch.arange(64) != 5].isfinite().all()


def test_all_arithmetic_stays_on_the_device_of_its_matrix():
    """Torch refuses to mix devices, and its `meta` is one: what would be made on the host by default shows without a
    GPU.
    """

    def on_meta(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    def x():
        return on_meta((20, 48), torch.float32)

    fp8, packed = torch.float8_e4m3fn, on_meta((20, 6), torch.int32)
    origin = on_meta((20, 48), torch.bfloat16)
    made = [
        *arithmetic.fp8_channel(x(), on_meta((20, 48), fp8), origin),
        *arithmetic.fp8_tensor(x(), on_meta((20, 48), fp8), 3.0),
        *arithmetic.fp8_block(x(), on_meta((20, 48), fp8), (7, 9)),
        *arithmetic.int8_channel(x(), on_meta((20, 48), torch.int8), origin),
        *arithmetic.int4_group(x(), packed, 16, torch.bfloat16),
        *arithmetic.int4_group_asymmetric(x(), packed, 16, torch.bfloat16),
    ]
    assert {one.device.type for one in made} == {"meta"}
