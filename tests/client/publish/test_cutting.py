"""Boxes cut for buckets: every element once, in C order, no part larger than a bucket, and none that need not be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcached.client.publish.cutting import parts
from weightcached.client.publish.values import Box, shape_of

MOST = 4096


def cut(shape: tuple[int, ...], itemsize: int, *, used: int = 0) -> list[Box]:
    """As a rank does: a part that does not fit begins another bucket."""
    found, room = [], [MOST - used]
    for part in parts(tuple(slice(0, extent) for extent in shape), itemsize, lambda: room[0], MOST):
        nbytes = math.prod(shape_of(part)) * itemsize
        room[0] = (room[0] if nbytes <= room[0] else MOST) - nbytes
        assert room[0] >= 0, part
        found.append(part)
    return found


@given(st.lists(st.integers(0, 40), max_size=4), st.sampled_from([1, 2, 4, 8]), st.integers(0, MOST))
def test_every_element_is_in_one_part_in_order(shape: list[int], itemsize: int, used: int) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found = [numbers[part].ravel() for part in cut(tuple(shape), itemsize, used=used)]
    assert np.array_equal(np.concatenate(found) if found else np.array([]), numbers.ravel())


def test_what_fits_is_not_cut() -> None:
    assert cut((64, 32), 2) == [(slice(0, 64), slice(0, 32))]


def test_what_is_small_is_not_cut_to_fill_a_bucket_up() -> None:
    assert cut((8, 32), 2, used=MOST - 64) == [(slice(0, 8), slice(0, 32))]


@pytest.mark.parametrize(("used", "rows"), [(0, [64, 64, 2]), (MOST // 2, [32, 64, 34])])
def test_rows_fill_buckets(used: int, rows: list[int]) -> None:
    assert [shape_of(part)[0] for part in cut((130, 32), 2, used=used)] == rows


def test_a_row_that_is_too_large_is_cut_too() -> None:
    assert [shape_of(part) for part in cut((2, 3000), 2)] == [(1, 2048), (1, 952), (1, 1096), (1, 1904)]
