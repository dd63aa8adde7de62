"""Slabs: a parameter cut into contiguous pieces of some MiB, each with the file ranges that fill it.

Pure: boxes and integers, no I/O. The executor takes slabs in order, so that files are read front to back, a digest
over the parameter's bytes can follow, and no more memory is needed than one slab for each thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, Literal, NamedTuple, TypeVar

from weightcached.loader.boxes import Box, Pieces, Shape, intersection, is_contiguous, pieces, reach, whole
from weightcached.loader.planned import Copy, PlannedParameter, Quantize, TensorHeader
from weightcached.protocol.dtypes import itemsize_bytes

SLAB_NBYTES = 8 << 20
"""Of source bytes, at most and by default. Each slab costs some handing over of the interpreter's lock, which in a
virtual machine takes as long as reading half a MiB; larger ones fall out of every cache before they are digested.
"""

_Item = TypeVar("_Item")


class Read(NamedTuple):
    """``ranges`` times ``length`` bytes: from ``offset`` in the tensor's file, ``pitch`` bytes from one to the next, to
    ``target`` in the slab's buffer, ``target_pitch`` bytes from one to the next.

    With ``column_itemsize`` the ranges stand side by side instead, as columns of elements of so many bytes: element
    ``j`` of range ``i`` goes to ``target + j * target_pitch + i * column_itemsize``.
    """

    tensor: TensorHeader
    offset: int
    """Absolute, in the file."""
    pitch: int
    target: int
    target_pitch: int
    length: int
    ranges: int
    column_itemsize: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that land in the buffer."""
        return self.length * self.ranges

    def band(self, first: int, count: int) -> Read:
        """Ranges ``first .. first + count`` alone, one after the other from the start of a buffer."""
        offset = self.offset + first * self.pitch
        return Read(self.tensor, offset, self.pitch, 0, self.length, self.length, count)

    @property
    def span_nbytes(self) -> int:
        """From the first byte read to the last, gaps included."""
        return self.pitch * (self.ranges - 1) + self.length


class Slab(NamedTuple):
    """Elements ``first .. first + elements`` of a parameter, in C order, as they are before its transform.

    ``reads`` and ``zeros`` together fill every byte of a buffer of ``source_nbytes`` bytes once, in the dtype that the
    parameter has before its transform.
    """

    parameter: PlannedParameter
    number: int
    """Counts the parameter's slabs from 0."""
    first: int
    elements: int
    source_nbytes: int
    reads: tuple[Read, ...]
    zeros: tuple[Pieces, ...]
    """Byte ranges of the buffer that are padding."""
    step: Literal["all", "measure", "quantize"] = "all"
    """What is done with it. Where a matrix has to be measured before it is quantized, its slabs come twice: all of them
    to be read and measured, then all of them, with nothing to read, to be quantized from memory."""


def slabs(parameter: PlannedParameter, *, slab_nbytes: int = SLAB_NBYTES) -> Iterator[Slab]:
    """The parameter's slabs, in order; none for an alias, for what quantization produces, or without elements.

    A slab is larger than ``slab_nbytes`` only where it must be: rows that are quantized together are never parted, and
    a matrix that is transposed is never cut, since each piece of it has some bytes of every row of the file's. It never
    has rows of two matrices that are quantized.
    """
    shape, transform = parameter.source_shape, parameter.transform
    if parameter.alias_of is not None or parameter.produced_by is not None or not math.prod(shape):
        return iter(())
    itemsize = itemsize_bytes(parameter.source_dtype or parameter.dtype)
    # What is computed with is float32 meanwhile, and has to stay in a cache, too.
    most = max(1, slab_nbytes // (itemsize if transform is None else max(itemsize, 4)))
    boxes = [*(copy.destination for copy in parameter.copies), *parameter.zeros]
    unbroken = all(is_contiguous(box, shape) for box in boxes) and all(
        is_contiguous(copy.source, copy.tensor.shape) and not copy.transposed for copy in parameter.copies
    )
    made = _linear(parameter, most, itemsize) if unbroken else _boxed(parameter, most, itemsize)
    if measures_first(parameter):
        return _measured_first(made, math.prod(shape[-2:]))
    return made


def measures_first(parameter: PlannedParameter) -> bool:
    """Whether nothing of a matrix can be quantized before the largest of all its values is known."""
    return isinstance(parameter.transform, Quantize) and parameter.transform.method.granularity == "tensor"


def reads_of(copy: Copy, shape: Shape, itemsize: int) -> Iterator[Read]:
    """All that is read for a copy to a parameter of this shape, as if that were one slab: for counting bytes before
    anything is read.
    """
    return _reads(copy, copy.destination, whole(shape), itemsize)


def _linear(parameter: PlannedParameter, most: int, itemsize: int) -> Iterator[Slab]:
    """Where every copy is one range of the file and of the parameter: no boxes, so a few microseconds a slab."""
    shape = parameter.source_shape
    copies = _Sweep([(*reach(copy.destination, shape), copy) for copy in parameter.copies])
    zeros = _Sweep([(*reach(box, shape), None) for box in parameter.zeros])
    origins = {id(copy): reach(copy.source, copy.tensor.shape)[0] for copy in parameter.copies}
    for number, (first, count) in enumerate(_extents(parameter, most)):
        reads = []
        for begin, end, copy in copies.over(first, count):
            start, stop = max(begin, first), min(end, first + count)
            nbytes = (stop - start) * itemsize
            offset = copy.tensor.offset + (origins[id(copy)] + start - begin) * itemsize
            reads.append(Read(copy.tensor, offset, nbytes, (start - first) * itemsize, nbytes, nbytes, 1))
        blank = []
        for begin, end, _ in zeros.over(first, count):
            start, stop = max(begin, first), min(end, first + count)
            blank.append(Pieces((start - first) * itemsize, (stop - start) * itemsize, (stop - start) * itemsize, 1))
        yield Slab(parameter, number, first, count, count * itemsize, tuple(reads), tuple(blank))


def _boxed(parameter: PlannedParameter, most: int, itemsize: int) -> Iterator[Slab]:
    """Where something is strided: slabs are boxes too, and what fills them is found by intersecting."""
    shape = parameter.source_shape
    copies = _Sweep([(*reach(copy.destination, shape), copy) for copy in parameter.copies])
    zeros = _Sweep([(*reach(box, shape), box) for box in parameter.zeros])
    first = 0
    for number, slab in enumerate(_cut(parameter, most)):
        count = slab.volume
        reads: list[Read] = []
        for _, _, copy in copies.over(first, count):
            part = intersection(copy.destination, slab)
            if part is not None:
                reads.extend(_reads(copy, part, slab, itemsize))
        blank: list[Pieces] = []
        for _, _, box in zeros.over(first, count):
            part = intersection(box, slab)
            if part is not None:
                blank.extend(_within(part, slab, itemsize))
        yield Slab(parameter, number, first, count, count * itemsize, tuple(reads), tuple(blank))
        first += count


def _extents(parameter: PlannedParameter, most: int) -> Iterator[tuple[int, int]]:
    """(first, elements) of each slab."""
    if isinstance(parameter.transform, Quantize):
        volumes = [box.volume for box in _cut(parameter, most)]
        return zip(itertools.accumulate(volumes, initial=0), volumes, strict=False)
    total = math.prod(parameter.shape)
    return ((first, min(most, total - first)) for first in range(0, total, most))


def _measured_first(made: Iterator[Slab], matrix_elements: int) -> Iterator[Slab]:
    for _, matrix in itertools.groupby(made, key=lambda slab: slab.first // matrix_elements):
        again = []
        for slab in matrix:
            yield slab._replace(step="measure")
            again.append(slab._replace(reads=(), zeros=(), step="quantize"))
        yield from again


def _cut(parameter: PlannedParameter, most: int) -> Iterator[Box]:
    """Boxes of at most ``most`` elements (or what is never parted), contiguous each, that are all of it, in C order."""
    shape, together = parameter.source_shape, 1
    transposed = any(copy.transposed for copy in parameter.copies)
    if isinstance(parameter.transform, Quantize):
        axis, inner = len(shape) - 2, shape[-1]
        together = shape[-2] if transposed else parameter.transform.rows_together
    else:
        axis, inner = 0, math.prod(shape[1:])
        last = len(shape) - (3 if transposed else 1)
        if last < 0:
            yield whole(shape)
            return
        while inner > most and axis < last:
            axis += 1
            inner //= shape[axis]
    step = max(1, most // (inner * together)) * together
    trailing = shape[axis + 1 :]
    for outer in itertools.product(*(range(extent) for extent in shape[:axis])):
        for start in range(0, shape[axis], step):
            yield Box(
                (*outer, start, *(0,) * len(trailing)),
                (*(1,) * axis, min(step, shape[axis] - start), *trailing),
            )


class _Sweep(Generic[_Item]):
    """Items with their reach (begin, end, item), handed out slab by slab, so that most are not looked at each time."""

    def __init__(self, items: list[tuple[int, int, _Item]]) -> None:
        self._waiting = sorted(items, key=lambda item: item[0], reverse=True)
        self._active: list[tuple[int, int, _Item]] = []

    def over(self, first: int, count: int) -> list[tuple[int, int, _Item]]:
        """What reaches into elements ``first .. first + count``. Ask in order."""
        if self._active:
            self._active = [item for item in self._active if item[1] > first]
        while self._waiting and self._waiting[-1][0] < first + count:
            self._active.append(self._waiting.pop())
        return self._active


def _within(part: Box, slab: Box, itemsize: int) -> Iterator[Pieces]:
    """Where ``part`` of the parameter lies in the slab's buffer."""
    start = tuple(a - b for a, b in zip(part.start, slab.start, strict=True))
    return pieces(Box(start, part.shape), slab.shape, itemsize)


def _reads(copy: Copy, part: Box, slab: Box, itemsize: int) -> Iterator[Read]:
    """The reads that bring ``part`` of the copy's destination into the slab's buffer."""
    if copy.transposed:
        yield from _transposed_reads(copy, part, slab, itemsize)
        return
    tensor = copy.tensor
    sources = pieces(source_of(copy, part), tensor.shape, itemsize)
    for source, target in paired(sources, _within(part, slab, itemsize)):
        yield Read(
            tensor,
            tensor.offset + source.offset,
            source.pitch,
            target.offset,
            target.pitch,
            source.length,
            source.count,
        )


def _transposed_reads(copy: Copy, part: Box, slab: Box, itemsize: int) -> Iterator[Read]:
    """The same where matrices are transposed, of which ``part`` has whole ones: a read for each."""
    tensor = copy.tensor
    within = Box(tuple(a - b for a, b in zip(part.start, slab.start, strict=True)), part.shape)
    columns, rows = part.shape[-2:]
    matrices = zip(_corners(source_of(copy, part), tensor.shape), _corners(within, slab.shape), strict=True)
    for source, target in matrices:
        yield Read(
            tensor,
            tensor.offset + source * itemsize,
            tensor.shape[-1] * itemsize,
            target * itemsize,
            slab.shape[-1] * itemsize,
            columns * itemsize,
            rows,
            itemsize,
        )


def _corners(box: Box, shape: Shape) -> Iterator[int]:
    """The first element of each of the box's matrices (its last two axes), in C order."""
    for group in pieces(Box(box.start, (*box.shape[:-2], 1, 1)), shape, 1):
        for number in range(group.count):
            first = group.offset + number * group.pitch
            yield from range(first, first + group.length)


def destination_of(copy: Copy, part: Box) -> Box:
    """The box of the parameter that ``part``, a box within the copy's source, becomes."""
    if copy.transposed:
        part = part.swapped
        copy = replace(copy, source=copy.source.swapped)
    return source_of(Copy(copy.tensor, copy.destination, copy.source), part)


def source_of(copy: Copy, part: Box) -> Box:
    """The box of the tensor that becomes ``part``. Axes of length one may stand on one side only."""
    if copy.transposed:
        return source_of(replace(copy, source=copy.source.swapped, transposed=False), part).swapped
    offsets = [start - begin for start, begin in zip(part.start, copy.destination.start, strict=True)]
    long = iter(
        [
            (offset, extent)
            for offset, extent, full in zip(offsets, part.shape, copy.destination.shape, strict=True)
            if full != 1
        ]
    )
    axes = [(0, 1) if extent == 1 else next(long) for extent in copy.source.shape]
    start = tuple(begin + offset for begin, (offset, _) in zip(copy.source.start, axes, strict=True))
    return Box(start, tuple(extent for _, extent in axes))


def paired(sources: Iterator[Pieces], targets: Iterator[Pieces]) -> Iterator[tuple[Pieces, Pieces]]:
    """Both sides regrouped so that each pair has ranges of equal length and number, in the same order.

    Ranges of one side are all of one length, a product of the box's last axes, so the shorter divides the longer.
    """
    some_source, some_target = next(sources), next(targets)
    length = min(some_source.length, some_target.length)
    left = _of_length(itertools.chain((some_source,), sources), length)
    right = _of_length(itertools.chain((some_target,), targets), length)
    source, target = next(left, None), next(right, None)
    while source is not None and target is not None:
        count = min(source.count, target.count)
        yield _first(source, count), _first(target, count)
        source = _after(source, count) or next(left, None)
        target = _after(target, count) or next(right, None)


def _of_length(groups: Iterator[Pieces], length: int) -> Iterator[Pieces]:
    for group in groups:
        if group.length == length:
            yield group
            continue
        for number in range(group.count):
            yield Pieces(group.offset + number * group.pitch, length, length, group.length // length)


def _first(group: Pieces, count: int) -> Pieces:
    return Pieces(group.offset, group.length, group.pitch, count)


def _after(group: Pieces, count: int) -> Pieces | None:
    if count == group.count:
        return None
    return Pieces(group.offset + count * group.pitch, group.length, group.pitch, group.count - count)
