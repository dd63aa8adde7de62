"""Boxes against numpy: byte pieces, contiguity, and the cover check on random boxes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcached.loader.boxes import (
    Box,
    Pieces,
    coverage_fault,
    intersects,
    is_contiguous,
    is_inside,
    pieces,
    whole,
)


@st.composite
def shapes_and_boxes(draw, count=1, max_axes=4):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=max_axes)))
    boxes = []
    for _ in range(count):
        start = tuple(draw(st.integers(0, n)) for n in shape)
        boxes.append(Box(start, tuple(draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True))))
    return shape, boxes


def elements(box, shape):
    """Flat indices of the box's elements, in C order."""
    index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return np.arange(math.prod(shape)).reshape(shape)[index].reshape(-1).tolist()


@given(shapes_and_boxes(), st.sampled_from([1, 2, 8]))
def test_pieces_are_the_box_s_bytes_in_order(case, itemsize):
    shape, (box,) = case
    groups = list(pieces(box, shape, itemsize))
    assert all(group.length > 0 and group.count > 0 for group in groups)
    ours = [
        byte
        for group in groups
        for i in range(group.count)
        for byte in range(group.offset + i * group.pitch, group.offset + i * group.pitch + group.length)
    ]
    assert ours == [i * itemsize + byte for i in elements(box, shape) for byte in range(itemsize)]


@given(shapes_and_boxes(max_axes=2))
def test_two_axes_make_one_group(case):
    shape, (box,) = case
    assert len(list(pieces(box, shape, 2))) == (1 if box.volume else 0)


@given(shapes_and_boxes())
def test_contiguous_means_one_range(case):
    shape, (box,) = case
    indices = elements(box, shape)
    unbroken = indices == list(range(indices[0], indices[0] + len(indices))) if indices else True
    assert is_contiguous(box, shape) == unbroken


@given(shapes_and_boxes(count=2))
def test_intersection_is_a_common_element(case):
    shape, (a, b) = case
    assert intersects(a, b) == bool(set(elements(a, shape)) & set(elements(b, shape)))


@given(shapes_and_boxes(count=4, max_axes=3), st.integers(0, 4))
def test_cover_check_agrees_with_counting(case, count):
    shape, boxes = case
    boxes = boxes[:count]
    counts = np.zeros(math.prod(shape), int)
    for box in boxes:
        counts[elements(box, shape)] += 1
    assert (coverage_fault(shape, boxes) is None) == bool((counts == 1).all())


@st.composite
def partitions(draw):
    """A shape cut into boxes, at random, down to a few levels."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[axis]))
        start, low, high = list(box.start), list(box.shape), list(box.shape)
        low[axis], high[axis] = cut, box.shape[axis] - cut
        boxes.append(Box(tuple(start), tuple(low)))
        start[axis] += cut
        boxes.append(Box(tuple(start), tuple(high)))
    return shape, draw(st.permutations(boxes))


@given(partitions(), st.data())
def test_a_partition_covers_and_nothing_less_or_more_does(case, data):
    shape, boxes = case
    assert coverage_fault(shape, boxes) is None
    full = [box for box in boxes if box.volume]
    chosen = data.draw(st.sampled_from(full))
    rest = list(boxes)
    rest.remove(chosen)
    assert "elements are written" in (coverage_fault(shape, rest) or "")
    assert "overlap" in (coverage_fault(shape, [*boxes, chosen]) or "")


def test_a_thousand_stacked_boxes_are_checked_quickly():
    shape = (4096, 8, 4)
    boxes = [Box((i, 4 * half, 0), (1, 4, 4)) for i in range(4096) for half in (0, 1)]
    assert coverage_fault(shape, boxes) is None
    assert coverage_fault(shape, boxes[:-1]) == f"{4096 * 32 - 16} of {4096 * 32} elements are written"


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        (Box((0, 0), (2, 3)), True),
        (Box((2, 3), (0, 0)), True),
        (Box((1, 0), (2, 3)), False),
        (Box((-1, 0), (1, 1)), False),
        (Box((0, 0), (1, -1)), False),
        (Box((0,), (2,)), False),
        (Box((0, 0), (2,)), False),
    ],
)
def test_inside(box, inside):
    assert is_inside(box, (2, 3)) is inside


def test_a_row_parallel_part_is_one_pitched_group():
    assert list(pieces(Box((0, 4), (6, 2)), (6, 8), 2)) == [Pieces(offset=8, length=4, pitch=16, count=6)]


def test_columns_of_stacked_experts_fold_into_one_group():
    assert list(pieces(Box((0, 0, 4), (3, 6, 2)), (3, 6, 8), 2)) == [Pieces(offset=8, length=4, pitch=16, count=18)]


def test_rows_of_stacked_experts_are_one_group():
    assert list(pieces(Box((0, 2, 0), (3, 2, 8)), (3, 6, 8), 1)) == [Pieces(offset=16, length=16, pitch=48, count=3)]


def test_a_scalar_is_one_range():
    assert list(pieces(Box((), ()), (), 4)) == [Pieces(0, 4, 4, 1)]
    assert coverage_fault((), [Box((), ())]) is None
    assert "overlap" in (coverage_fault((), [Box((), ())] * 2) or "")
