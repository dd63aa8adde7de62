"""Boxes: which elements of a tensor a copy reads or writes, and the arithmetic on them.

Pure: shapes and integers only, no dtype knowledge beyond an item size, no I/O. Plans are made of boxes, executors
turn them into byte ranges, the coverage proof adds them up. All tensors are in C order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open range per axis: elements ``start[i] <= index[i] < start[i] + shape[i]``. No axes: one scalar."""

    start: Shape
    shape: Shape

    @property
    def stop(self) -> Shape:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def volume(self) -> int:
        """Elements in the box."""
        return math.prod(self.shape)

    @property
    def swapped(self) -> Box:
        """The same elements of a tensor whose last two axes are swapped. Needs two axes."""
        return Box((*self.start[:-2], *self.start[:-3:-1]), (*self.shape[:-2], *self.shape[:-3:-1]))


@dataclass(frozen=True, slots=True)
class Pieces:
    """``count`` equal byte ranges of ``length`` bytes, the first at ``offset``, each ``pitch`` bytes after the last.

    One range has ``count == 1`` and ``pitch == length``. Offsets are relative to the tensor's first byte.
    """

    offset: int
    length: int
    pitch: int
    count: int


def whole(shape: Shape) -> Box:
    """The box that is all of a tensor of this shape."""
    return Box((0,) * len(shape), shape)


def is_inside(box: Box, shape: Shape) -> bool:
    """Whether the box has the tensor's axes and stays within them."""
    if len(box.start) != len(shape) or len(box.shape) != len(shape):
        return False
    for start, extent, limit in zip(box.start, box.shape, shape, strict=True):
        if start < 0 or extent < 0 or start + extent > limit:
            return False
    return True


def is_contiguous(box: Box, shape: Shape) -> bool:
    """Whether the box's elements are one unbroken range of a tensor of this shape (an empty box is)."""
    return box.volume in (0, _run(box, shape)[1])


def pieces(box: Box, shape: Shape, itemsize_bytes: int) -> Iterator[Pieces]:
    """The box's bytes within a tensor of this shape, in C order, as regular groups of equal byte ranges.

    Two dimensions always give one group; more axes give one group for each index of the axes that do not fold.
    """
    axis, run = _run(box, shape)
    count = box.volume // run if run else 0
    if count == 0:
        return
    strides = _strides(shape)
    base = sum(a * s for a, s in zip(box.start, strides, strict=True))
    if count == 1:
        yield Pieces(base * itemsize_bytes, run * itemsize_bytes, run * itemsize_bytes, 1)
        return
    # Fold the axes before the run while they are walked with one stride, then walk what is left index by index.
    outer = axis
    folded = 1
    pitch = 0
    while outer > 0:
        extent = box.shape[outer - 1]
        if extent > 1:
            if folded > 1 and strides[outer - 1] != pitch * folded:
                break
            pitch = pitch if folded > 1 else strides[outer - 1]
            folded *= extent
        outer -= 1
    for offset in _offsets(box.shape[:outer], strides[:outer]):
        yield Pieces((base + offset) * itemsize_bytes, run * itemsize_bytes, pitch * itemsize_bytes, folded)


def intersects(a: Box, b: Box) -> bool:
    """Whether two boxes of one tensor share an element."""
    return all(
        a0 < b0 + bn and b0 < a0 + an and an > 0 and bn > 0
        for a0, an, b0, bn in zip(a.start, a.shape, b.start, b.shape, strict=True)
    )


def intersection(a: Box, b: Box) -> Box | None:
    """The elements that two boxes of one tensor share; ``None`` where there are none."""
    start = tuple(map(max, a.start, b.start))
    extents = tuple(
        min(a0 + an, b0 + bn) - begin
        for a0, an, b0, bn, begin in zip(a.start, a.shape, b.start, b.shape, start, strict=True)
    )
    return Box(start, extents) if all(extent > 0 for extent in extents) else None


def reach(box: Box, shape: Shape) -> tuple[int, int]:
    """The box's first element in C order of a tensor of this shape, and one past its last."""
    strides = _strides(shape)
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    last = sum((stop - 1) * stride for stop, stride in zip(box.stop, strides, strict=True))
    return first, last + 1


def coverage_fault(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Why the boxes do not cover a tensor of this shape exactly once, or ``None`` when they do.

    Inside, disjoint, and volumes that add up: together these mean every element is in exactly one box.
    """
    total = math.prod(shape)
    covered = 0
    for box in boxes:
        if not is_inside(box, shape):
            return f"{box} is not inside shape {shape}"
        covered += box.volume
    pair = _intersecting_pair(boxes)
    if pair is not None:
        return f"{pair[0]} and {pair[1]} overlap"
    if covered != total:
        return f"{covered} of {total} elements are written"
    return None


def _intersecting_pair(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Some two boxes that share an element. Sweeps the first axis, so stacked parts (experts) cost n log n."""
    if len(boxes) < 2:
        return None
    if not boxes[0].shape:
        return boxes[0], boxes[1]
    active: list[Box] = []
    for box in sorted((b for b in boxes if b.volume), key=lambda b: b.start):
        first = box.start[0]
        active = [other for other in active if other.start[0] + other.shape[0] > first]
        for other in active:
            if intersects(other, box):
                return other, box
        active.append(box)
    return None


def _run(box: Box, shape: Shape) -> tuple[int, int]:
    """(axis, elements): the longest unbroken range, which starts at ``axis`` and spans it and all later axes."""
    run = 1
    for axis in range(len(shape) - 1, -1, -1):
        run *= box.shape[axis]
        if box.shape[axis] != shape[axis]:
            return axis, run
    return 0, run


def _strides(shape: Shape) -> Shape:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def _offsets(extents: Shape, strides: Shape) -> Iterator[int]:
    """Element offsets of every index of the given axes, in C order."""
    if not extents:
        yield 0
        return
    for index in range(extents[0]):
        for rest in _offsets(extents[1:], strides[1:]):
            yield index * strides[0] + rest
