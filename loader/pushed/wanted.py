"""What a trainer may push to this rank: every tensor of the checkpoint's headers, and which boxes of it are needed.

Pure: from a placement to a table, whose order numbers the tensors on the wire. Boxes of one tensor are disjoint, so
that whoever pushes each of them once has pushed every element once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weightcached.loader.boxes import Box, Shape, intersection
from weightcached.loader.layout import Placement
from weightcached.loader.planned import Copy, TensorHeader
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import PlanError
from weightcached.protocol.push_messages import PAGE_TENSORS_MAX, PushedBox, Wanted, WantedTensor

_PAGE_NBYTES = 512 * 1024
"""What a page takes at most, about: half of what a frame may."""
_INTEGER_NBYTES = 9
"""The longest that msgpack makes of one."""


@dataclass(frozen=True, slots=True)
class Use:
    """A copy that reads the tensor, and the place among ``placement.placed`` of the parameter that it is to."""

    parameter: int
    copy: Copy


@dataclass(frozen=True, slots=True)
class Pushable:
    """One tensor. ``shape`` is the plan's; ``same_as`` the file's where that is another, of the same elements."""

    name: str
    dtype: str
    shape: Shape
    same_as: tuple[Shape, ...]
    boxes: tuple[Box, ...]
    uses: tuple[Use, ...]

    @property
    def nbytes(self) -> int:
        """Of all its boxes."""
        return sum(box.volume for box in self.boxes) * itemsize_bytes(self.dtype)


def pushables(placement: Placement, headers: Mapping[str, TensorHeader]) -> tuple[Pushable, ...]:
    """The table, in the headers' order, then what is only a second name of something else and never needed itself."""
    uses: dict[str, list[Use]] = {}
    for number, placed in enumerate(placement.placed):
        for copy in placed.parameter.copies:
            uses.setdefault(copy.tensor.name, []).append(Use(number, copy))
    table = [_pushable(header, uses.get(name, ())) for name, header in headers.items()]
    for placed in placement.placed:
        one = placed.parameter
        if one.alias_of is not None and one.name not in headers:
            table.append(Pushable(one.name, one.dtype, one.shape, (), (), ()))
    return tuple(table)


def _pushable(header: TensorHeader, uses: Sequence[Use]) -> Pushable:
    shapes = {use.copy.tensor.shape for use in uses} or {header.shape}
    if len(shapes) > 1:
        raise PlanError(f"the plan reads {header.name} in several shapes", found=sorted(shapes))
    (shape,) = shapes
    same_as = () if shape == header.shape else (header.shape,)
    boxes = _disjoint(dict.fromkeys(use.copy.source for use in uses))
    return Pushable(header.name, header.dtype, shape, same_as, boxes, tuple(uses))


def _disjoint(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The same boxes; where two of them share elements, one box around them all."""
    found = tuple(boxes)
    if all(intersection(one, other) is None for one, other in itertools.combinations(found, 2)):
        return found
    start = tuple(map(min, *(box.start for box in found)))
    stop = tuple(map(max, *(box.stop for box in found)))
    return (Box(start, tuple(b - a for a, b in zip(start, stop, strict=True))),)


def pages(table: Sequence[Pushable]) -> Iterator[Wanted]:
    """The table as messages, each within a frame's limits."""
    page: list[WantedTensor] = []
    nbytes = 0
    for one in table:
        size = len(one.name.encode()) + _INTEGER_NBYTES * len(one.shape) * (1 + len(one.same_as) + 2 * len(one.boxes))
        if page and (nbytes + size > _PAGE_NBYTES or len(page) == PAGE_TENSORS_MAX):
            yield Wanted(tensors=tuple(page), last=False)
            page, nbytes = [], 0
        page.append(_message(one))
        nbytes += size
    yield Wanted(tensors=tuple(page), last=True)


def _message(one: Pushable) -> WantedTensor:
    boxes = tuple(PushedBox(start=box.start, shape=box.shape) for box in one.boxes)
    return WantedTensor(name=one.name, dtype=one.dtype, shape=one.shape, same_as=one.same_as, boxes=boxes)
