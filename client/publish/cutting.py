"""Cutting a box into parts that fit into buckets. Pure.

Parts are as large as there is room, whole rows first: what is contiguous in a tensor stays together, and the worker
gets few, long ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from weightcached.client.publish.values import Box, shape_of


def parts(box: Box, itemsize: int, room: Callable[[], int], most: int) -> Iterator[Box]:
    """The box in parts, in C order. ``room()`` says how many bytes the next part may have at best, and ``most`` what an
    empty bucket has; a part that is larger than the room but not than ``most`` is for another bucket. What is smaller
    than a quarter of a bucket is not cut to fill one up.
    """
    shape = shape_of(box)
    nbytes = math.prod(shape) * itemsize
    if not nbytes:
        return
    if nbytes <= room() or nbytes <= most // 4:
        yield box
        return
    axis = next((axis for axis, extent in enumerate(shape) if extent > 1), None)
    if axis is None:
        yield box
        return
    row_nbytes = nbytes // shape[axis]
    begin, end = box[axis].start, box[axis].stop
    while begin < end:
        if row_nbytes > most:
            yield from parts(_with(box, axis, begin, begin + 1), itemsize, room, most)
            begin += 1
            continue
        left = room()
        count = min(end - begin, (left if left >= max(row_nbytes, most // 4) else most) // row_nbytes)
        yield _with(box, axis, begin, begin + count)
        begin += count


def _with(box: Box, axis: int, start: int, stop: int) -> Box:
    return (*box[:axis], slice(start, stop), *box[axis + 1 :])
