"""Slabs: whatever the boxes, each byte of a parameter is filled once and from the right place."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import naive
from tests.support.checkpoints import tiny_config
from tests.support.partitions import header, partitioned
from tests.support.plans import cache_config
from weightcached.loader.accounting import account
from weightcached.loader.boxes import whole
from weightcached.loader.planned import Copy, LoadPlan, PlannedParameter
from weightcached.loader.quantizers import quantizer
from weightcached.loader.reading import requests, spans
from weightcached.loader.slabs import SLAB_NBYTES, Read, reads_of, slabs
from weightcached.protocol.quantization import Quantization


def moves(read: Read) -> Iterator[tuple[int, int, int]]:
    """(from in the tensor, to in the buffer, bytes) of what the read says: by element where it makes columns."""
    for i in range(read.ranges):
        source = read.offset - read.tensor.offset + i * read.pitch
        if read.column_itemsize is None:
            yield source, read.target + i * read.target_pitch, read.length
            continue
        for j in range(read.length // read.column_itemsize):
            at = j * read.column_itemsize
            yield source + at, read.target + j * read.target_pitch + i * read.column_itemsize, read.column_itemsize


@settings(max_examples=300, deadline=None)
@given(partitioned(), st.integers(1, 40))
def test_any_partition_is_filled_as_numpy_would(case, slab_nbytes):
    parameter, tensors = case
    config = cache_config(tiny_config())
    plan = LoadPlan(config, (parameter,), account(expected=(), present=(), ignored={}))
    wanted = naive.execute(plan, tensors)["p"]
    got = np.full(wanted.size, -1, np.int16)
    next_element = 0
    for number, slab in enumerate(slabs(parameter, slab_nbytes=slab_nbytes)):
        assert (slab.number, slab.first, slab.source_nbytes) == (number, next_element, slab.elements * 2)
        transposed = any(copy.transposed for copy in parameter.copies)
        assert slab.source_nbytes <= max(slab_nbytes, 2 * math.prod(parameter.shape[-2:]) if transposed else 2)
        next_element += slab.elements
        buffer = bytearray(slab.source_nbytes)
        written = np.zeros(slab.source_nbytes, np.uint8)
        for read in slab.reads:
            data = tensors[read.tensor.name].tobytes()
            for source, target, nbytes in moves(read):
                assert 0 <= source <= len(data) - nbytes
                buffer[target : target + nbytes] = data[source : source + nbytes]
                written[target : target + nbytes] += 1
        for zeros in slab.zeros:
            for n in range(zeros.count):
                at = zeros.offset + n * zeros.pitch
                buffer[at : at + zeros.length] = bytes(zeros.length)
                written[at : at + zeros.length] += 1
        assert (written == 1).all()
        got[slab.first : slab.first + slab.elements] = np.frombuffer(bytes(buffer), np.int16)
    assert next_element == wanted.size
    assert (got == wanted.reshape(-1)).all()


@settings(max_examples=100, deadline=None)
@given(partitioned())
def test_all_reads_at_once_bring_the_same_bytes(case):
    parameter, _ = case
    kept = sum(copy.destination.volume * 2 for copy in parameter.copies)
    reads = [read for copy in parameter.copies for read in reads_of(copy, parameter.shape, 2)]
    assert sum(read.nbytes for read in reads) == kept
    read_nbytes = sum(nbytes for read in reads for _, nbytes in spans(read))
    assert sum(nbytes for _, nbytes in requests(parameter)) == read_nbytes >= kept


def test_a_large_copy_is_cut_into_slabs_of_eight_mebibytes():
    tensor = header("t", (24 << 20,))
    box = whole(tensor.shape)
    parameter = PlannedParameter("p", tensor.shape, "int16", "int16", (Copy(tensor, box, box),))
    made = list(slabs(parameter))
    assert [slab.source_nbytes for slab in made] == [SLAB_NBYTES] * 6
    assert [slab.reads[0].offset for slab in made] == [64 + n * SLAB_NBYTES for n in range(6)]


def to_be_quantized(name: str, shape: tuple[int, ...], *, strided: bool = False) -> PlannedParameter:
    """A float16 weight that all of one tensor becomes, or, ``strided``, its first columns."""
    tensor = header("t", (*shape[:-1], shape[-1] + (10 if strided else 0)), "float16")
    made = quantizer("p", shape, Quantization.named(name), dtype="float16")
    copies = (Copy(tensor, whole(shape), whole(shape)),)
    first = made.products[0]
    return PlannedParameter(first.name, first.shape, first.dtype, "float16", copies, transform=made)


def rows_of(parameter: PlannedParameter, slab_rows: int) -> list[tuple[int, int]]:
    """(first row, rows) of each slab, when there is room for ``slab_rows``."""
    columns = parameter.source_shape[-1]
    made = list(slabs(parameter, slab_nbytes=columns * 4 * slab_rows))
    assert all(slab.first % columns == slab.elements % columns == 0 for slab in made)
    return [(slab.first // columns, slab.elements // columns) for slab in made]


@pytest.mark.parametrize("strided", [False, True])
def test_rows_that_share_a_scale_are_never_parted(strided):
    channels = to_be_quantized("fp8", (5, 24), strided=strided)
    assert rows_of(channels, 2) == [(0, 2), (2, 2), (4, 1)]
    assert rows_of(channels, 0) == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]
    blocks = to_be_quantized("fp8-block=4x8", (10, 24), strided=strided)
    assert rows_of(blocks, 1) == [(0, 4), (4, 4), (8, 2)]
    assert rows_of(blocks, 9) == [(0, 8), (8, 2)]
    zero_points = to_be_quantized("int4-asym=8", (20, 24), strided=strided)
    assert rows_of(zero_points, 3) == [(0, 8), (8, 8), (16, 4)]


@pytest.mark.parametrize("strided", [False, True])
def test_no_slab_has_rows_of_two_matrices(strided):
    stack = to_be_quantized("fp8-block=4x8", (3, 6, 24), strided=strided)
    assert rows_of(stack, 100) == [(0, 6), (6, 6), (12, 6)]
    assert rows_of(stack, 4) == [(0, 4), (4, 2), (6, 4), (10, 2), (12, 4), (16, 2)]


@pytest.mark.parametrize("strided", [False, True])
def test_a_matrix_with_one_scale_is_read_whole_before_it_is_quantized(strided):
    stack = to_be_quantized("fp8-tensor", (2, 6, 24), strided=strided)
    made = list(slabs(stack, slab_nbytes=24 * 4 * 4))
    assert [slab.step for slab in made] == (["measure"] * 2 + ["quantize"] * 2) * 2
    assert [(slab.number, slab.first // 24, slab.elements // 24) for slab in made] == [
        (2 * matrix + n, 6 * matrix + 4 * n, 4 - 2 * n) for matrix in range(2) for _ in range(2) for n in range(2)
    ]
    assert all(bool(slab.reads) == (slab.step == "measure") for slab in made)


def test_a_transposed_matrix_is_never_cut_but_a_stack_of_them_is():
    """Each piece of it would take some bytes of every row, and so read the whole file's matrix again."""
    tensor = header("t", (5, 30, 20))
    copy = Copy(tensor, whole(tensor.shape), whole((5, 20, 30)), transposed=True)
    parameter = PlannedParameter("p", (5, 20, 30), "int16", "int16", (copy,))
    assert [slab.elements for slab in slabs(parameter, slab_nbytes=7)] == [600] * 5
    assert [slab.elements for slab in slabs(parameter, slab_nbytes=2500)] == [1200, 1200, 600]


def test_aliases_scales_and_empty_parameters_have_no_slabs():
    empty = PlannedParameter("e", (3, 0), "int16", None, ())
    alias = PlannedParameter("a", (3,), "int16", None, (), alias_of="p")
    scale = PlannedParameter("s", (3, 1), "float32", None, (), produced_by="p")
    assert [list(slabs(parameter)) for parameter in (empty, alias, scale)] == [[], [], []]
