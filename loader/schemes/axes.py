"""How a tensor that goes with a weight is cut where the weight's cut is known: axis by axis, by whole units or not.

Pure. One axis of a weight shows in another tensor as it is, packed (eight to an integer), by groups or blocks (one
scale for some neighbours), or not (one for all).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from weightcached.loader.architectures.rows import Part, Wanted
from weightcached.loader.boxes import Box, Shape


@dataclass(frozen=True, slots=True)
class Axis:
    """How an axis of the weight shows in another tensor: one element there for every ``per`` here."""

    per: int | None = 1
    """``None``: one element for the whole axis, which every rank has."""
    unit: str = "element"
    """What ``per`` elements are, for people."""
    ragged: bool = False
    """The last unit of the whole axis may be short."""
    uncut: bool = False
    """Every rank has all units, however the weight is cut."""

    def seen(self, source: Span, target: Span) -> tuple[Span, Span]:
        """Source and target span of the other tensor. Raises Misaligned unless both are whole units."""
        if self.per is None:
            return Span(1, 0, 1), Span(1, 0, 1)
        if self.uncut:
            source = target = Span(source.total, 0, source.total)
        short = self.ragged and source.count == source.total and target.start + target.count == target.total
        if source.start % self.per or target.start % self.per or (source.count % self.per and not short):
            raise Misaligned(self, source, target)
        return self._units(source, self.per), self._units(target, self.per)

    def _units(self, span: Span, per: int) -> Span:
        return Span(-(-span.total // per), span.start // per, -(-span.count // per))


class Misaligned(Exception):
    """A share of the weight is not whole units of another tensor."""

    def __init__(self, axis: Axis, source: Span, target: Span) -> None:
        super().__init__(f"{source.count} of {source.total} elements are not whole {axis.unit}s of {axis.per}")
        self.axis, self.source, self.target = axis, source, target


EACH = Axis()
ONE = Axis(per=None)


def packed(count: int) -> Axis:
    """So many neighbours in one integer."""
    return Axis(count, "packed integer")


def groups(size: int, *, uncut: bool = False) -> Axis:
    """One value for each group of neighbours; size -1 is one for all."""
    return ONE if size == -1 else Axis(size, "group", uncut=uncut)


def blocks(size: int) -> Axis:
    """One value for each block; the last of a whole axis may be short."""
    return Axis(size, "block", ragged=True)


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``start .. start + count`` of an axis of ``total``."""

    total: int
    start: int
    count: int


class Matrix(NamedTuple):
    """A part of a weight, by its last two axes: of the checkpoint's ``whole``, in ``local``."""

    whole: Shape
    start: Shape
    extents: Shape
    local: Shape
    at: Shape
    transposed: bool

    @classmethod
    def of(cls, weight: Wanted, part: Part) -> Matrix:
        box = part.box
        return cls(
            part.shape[-2:],
            box.start[-2:],
            box.shape[-2:],
            weight.shape[-2:],
            part.destination.start[-2:],
            part.transposed,
        )


class Cut(NamedTuple):
    """A part of another tensor: of the checkpoint's ``whole``, ``box`` goes to ``destination`` in ``shape``."""

    whole: Shape
    box: Box
    destination: Box
    shape: Shape

    def stacked(self, name: str, weight: Part) -> Part:
        """The same in the places of stacks that the weight's part has."""
        box, place = weight.box, weight.destination
        return Part(
            name,
            (*weight.shape[:-2], *self.whole),
            Box((*box.start[:-2], *self.box.start), (*box.shape[:-2], *self.box.shape)),
            Box((*place.start[:-2], *self.destination.start), (*place.shape[:-2], *self.destination.shape)),
        )


@lru_cache(maxsize=1024)
def cut(matrix: Matrix, rows: Axis, columns: Axis, inputs_first: bool) -> Cut:
    """How a tensor is cut whose ``rows`` and ``columns`` follow the weight's. All layers, all experts ask the same."""
    spans = []
    for ours, axis in enumerate((rows, columns)):
        theirs = 1 - ours if matrix.transposed else ours
        count = matrix.extents[theirs]
        source = Span(matrix.whole[theirs], matrix.start[theirs], count)
        spans.append(axis.seen(source, Span(matrix.local[ours], matrix.at[ours], count)))
    sources, targets = zip(*(spans[::-1] if inputs_first else spans), strict=True)
    return Cut(_shape(sources), _box(sources), _box(targets), _shape(targets))


def _shape(spans: tuple[Span, ...]) -> Shape:
    return tuple(span.total for span in spans)


def _box(spans: tuple[Span, ...]) -> Box:
    return Box(tuple(span.start for span in spans), tuple(span.count for span in spans))
