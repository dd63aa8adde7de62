"""Parameters cut at random, for tests of what fills them: hypothesis draws the boxes, numpy the tensors behind them."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from weightcached.loader.boxes import Box, whole
from weightcached.loader.planned import Copy, PlannedParameter, TensorHeader


def header(name: str, shape: tuple[int, ...], dtype: str = "int16", offset: int = 64) -> TensorHeader:
    """A tensor in a file of its own, of the same name."""
    return TensorHeader(name, dtype, shape, name, offset, math.prod(shape) * np.dtype(dtype).itemsize)


@st.composite
def partitioned(draw):
    """(parameter, tensors): a parameter cut at random into boxes, each padding or a box of some larger tensor.

    Matrices of some tensors are transposed.
    """
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
        transposed = len(shape) > 1 and draw(st.booleans())
        leading, matrix = (box.shape[:-2], box.shape[:-3:-1]) if transposed else (box.shape, ())
        extents = [extent for extent in leading if extent > 1 or draw(st.booleans())]  # axes of one may be missing
        extents += matrix
        start = [draw(st.integers(0, 2)) for _ in extents]
        outer = [a + n + draw(st.integers(0, 2)) for a, n in zip(start, extents, strict=True)]
        name = f"t{number}"
        values = np.arange(1, math.prod(outer) + 1, dtype=np.int16).reshape(outer) + 1000 * number
        tensors[name] = values
        copies.append(Copy(header(name, tuple(outer)), Box(tuple(start), tuple(extents)), box, transposed))
    dtype = "int16"
    parameter = PlannedParameter("p", shape, dtype, dtype if copies else None, tuple(copies), tuple(zeros))
    return parameter, tensors
