"""Slabs: whatever the boxes, each byte of a parameter is filled once and from the right place."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import naive
from tests.support.checkpoints import tiny_config
from tests.support.plans import cache_config
from weightcached.loader.accounting import account
from weightcached.loader.boxes import Box, whole
from weightcached.loader.planned import Copy, LoadPlan, PlannedParameter, QuantizeFp8, TensorHeader
from weightcached.loader.reading import requests, spans
from weightcached.loader.slabs import SLAB_NBYTES, reads_of, slabs


def header(name: str, shape: tuple[int, ...], dtype: str = "int16", offset: int = 64) -> TensorHeader:
    return TensorHeader(name, dtype, shape, "f", offset, math.prod(shape) * np.dtype(dtype).itemsize)


@st.composite
def partitioned(draw):
    """(parameter, tensors): a parameter cut at random into boxes, each padding or a box of some larger tensor."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axes = [axis for axis, extent in enumerate(box.shape) if extent > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(axes))
        at = draw(st.integers(1, box.shape[axis] - 1))
        low, high = list(box.shape), list(box.shape)
        low[axis], high[axis] = at, box.shape[axis] - at
        start = list(box.start)
        start[axis] += at
        boxes += [Box(box.start, tuple(low)), Box(tuple(start), tuple(high))]
    copies, zeros, tensors = [], [], {}
    for number, box in enumerate(boxes):
        if draw(st.integers(0, 4)) == 0:
            zeros.append(box)
            continue
        extents = [extent for extent in box.shape if extent > 1 or draw(st.booleans())]  # axes of one may be missing
        start = [draw(st.integers(0, 2)) for _ in extents]
        outer = [a + n + draw(st.integers(0, 2)) for a, n in zip(start, extents, strict=True)]
        name = f"t{number}"
        values = np.arange(1, math.prod(outer) + 1, dtype=np.int16).reshape(outer) + 1000 * number
        tensors[name] = values
        copies.append(Copy(header(name, tuple(outer)), Box(tuple(start), tuple(extents)), box))
    dtype = "int16"
    parameter = PlannedParameter("p", shape, dtype, dtype if copies else None, tuple(copies), tuple(zeros))
    return parameter, tensors


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
        assert slab.source_nbytes <= max(slab_nbytes, 2)
        next_element += slab.elements
        buffer = bytearray(slab.source_nbytes)
        written = np.zeros(slab.source_nbytes, np.uint8)
        for read in slab.reads:
            data = tensors[read.tensor.name].tobytes()
            for n in range(read.ranges):
                source, target = read.offset - read.tensor.offset + n * read.pitch, read.target + n * read.target_pitch
                assert 0 <= source <= len(data) - read.length
                buffer[target : target + read.length] = data[source : source + read.length]
                written[target : target + read.length] += 1
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


def test_a_large_copy_is_cut_into_slabs_of_a_mebibyte():
    tensor = header("t", (3 << 20,))
    box = whole(tensor.shape)
    parameter = PlannedParameter("p", tensor.shape, "int16", "int16", (Copy(tensor, box, box),))
    made = list(slabs(parameter))
    assert [slab.source_nbytes for slab in made] == [SLAB_NBYTES] * 6
    assert [slab.reads[0].offset for slab in made] == [64 + n * SLAB_NBYTES for n in range(6)]


@pytest.mark.parametrize("strided", [False, True])
def test_a_row_is_never_cut_when_it_will_be_quantized(strided):
    tensor = header("t", (5, 30), "float16")
    box = Box((0, 0), (5, 20)) if strided else whole((5, 30))
    parameter = PlannedParameter(
        "p", box.shape, "float8_e4m3fn", "float16", (Copy(tensor, box, whole(box.shape)),), transform=QuantizeFp8("s")
    )
    columns = box.shape[1]
    assert [slab.elements for slab in slabs(parameter, slab_nbytes=columns * 2 * 2)] == [columns * 2] * 2 + [columns]
    assert [slab.elements for slab in slabs(parameter, slab_nbytes=7)] == [columns] * 5


def test_aliases_scales_and_empty_parameters_have_no_slabs():
    empty = PlannedParameter("e", (3, 0), "int16", None, ())
    alias = PlannedParameter("a", (3,), "int16", None, (), alias_of="p")
    scale = PlannedParameter("s", (3, 1), "float32", None, (), produced_by="p")
    assert [list(slabs(parameter)) for parameter in (empty, alias, scale)] == [[], [], []]
