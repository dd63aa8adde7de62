"""A linear layer as a quantization scheme sees it: the weight's cut, and what follows from it for the other tensors.

Pure. Tables cut one weight ``[out, in]`` into boxes and know nothing of quantization. A scheme says how each axis of
the weight shows in each tensor that it keeps instead (packed eight to an integer, one scale for a group), and the
boxes follow. What does not align with this rank's share is refused; no scale is ever the neighbour's.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from weightcached.loader.architectures.rows import Part, Wanted
from weightcached.loader.boxes import Box, Shape, whole
from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.errors import UnsupportedModel

WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a scheme makes of one layer: parameters, in the layout's order, and names that it leaves out, with why."""

    parameters: tuple[Wanted, ...]
    excuses: Mapping[str, str] = field(default_factory=dict)


class Scheme(Protocol):
    """How one linear layer is stored. Schemes compare by value: the parts of a fused layer must have equal ones."""

    def quantized(self, layer: Linear) -> Quantized:
        """The parameters that stand for the layer's weight. Raises UnsupportedModel where the cut does not align."""
        ...


@dataclass(frozen=True, slots=True)
class KvScale:
    """The shape and the dtype that engines give a KV-cache scale; ``None``: the model's."""

    shape: Shape
    dtype: str | None


class Method(Protocol):
    """What a checkpoint's ``quantization_config`` says."""

    @property
    def kv_scale(self) -> KvScale | None:
        """What engines make of a KV-cache scale; ``None`` where they take none from the checkpoint."""
        ...

    def scheme_of(self, module: str, present: Container[str]) -> Scheme | None:
        """How the checkpoint's ``module`` is stored: ``None`` is plain. ``present``: the checkpoint's tensor names."""
        ...


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

    def seen(self, source: _Span, target: _Span) -> tuple[_Span, _Span]:
        """Source and target span of the other tensor. Raises Misaligned unless both are whole units."""
        if self.per is None:
            return _Span(1, 0, 1), _Span(1, 0, 1)
        if self.uncut:
            source = target = _Span(source.total, 0, source.total)
        short = self.ragged and source.count == source.total and target.start + target.count == target.total
        if source.start % self.per or target.start % self.per or (source.count % self.per and not short):
            raise Misaligned(self, source, target)
        return self._units(source, self.per), self._units(target, self.per)

    def _units(self, span: _Span, per: int) -> _Span:
        return _Span(-(-span.total // per), span.start // per, -(-span.count // per))


class Misaligned(Exception):
    """A share of the weight is not whole units of another tensor."""

    def __init__(self, axis: Axis, source: _Span, target: _Span) -> None:
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
class _Span:
    """Elements ``start .. start + count`` of an axis of ``total``."""

    total: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer of this rank, or a stack of experts. Each part is one matrix ``[out, in]`` of the checkpoint.

    The weight is ``[out, in]``, of experts ``[experts, out, in]``; their tensors have the first axis, too.
    """

    weight: Wanted

    @property
    def name(self) -> str:
        return self.weight.name.removesuffix(WEIGHT)

    @property
    def is_stacked(self) -> bool:
        """Whether these are experts."""
        return len(self.weight.shape) > 2

    @property
    def modules(self) -> tuple[str, ...]:
        """The checkpoint's name of each part's module."""
        return tuple(part.source.removesuffix(WEIGHT) for part in self.weight.parts)

    def tensor(
        self,
        suffix: str,
        rows: Axis = EACH,
        columns: Axis = EACH,
        *,
        dtype: str | None,
        inputs_first: bool = False,
        ending: str | None = None,
    ) -> Wanted:
        """The tensor ``suffix``, cut as the weight is. ``inputs_first``: it lies ``[in, out]``, in the file as here.

        ``ending``: how its name in the file goes on after the module's, where that is not the same.
        """
        shape, parts = self.weight.shape, []
        for module, part in zip(self.modules, self.weight.parts, strict=True):
            name = f"{module}.{suffix}" if ending is None else f"{module}{ending}"
            try:
                cut = _cut(shape, part.shape, part.box, part.destination, rows, columns, part.transposed, inputs_first)
            except Misaligned as fault:
                raise UnsupportedModel(
                    f"this rank's share of {part.source} does not align with {name}: {fault}",
                    expected=f"shares that are whole {fault.axis.unit}s of {fault.axis.per}",
                    found=f"elements {fault.source.start} to {fault.source.start + fault.source.count} of the "
                    f"checkpoint's {fault.source.total}, from {fault.target.start} on in the fused layer",
                    next_step="use a smaller TP size, or a checkpoint that is not quantized",
                ) from None
            parts.append((name, cut))
        return self._wanted(
            suffix, parts[0][1].shape, [Part(name, cut.whole, cut.box, cut.destination) for name, cut in parts], dtype
        )

    def slots(self, suffix: str, *, dtype: str) -> Wanted:
        """The tensor ``suffix``, a scalar of each part, side by side; experts of one part each have no axis for it."""
        stack = self.weight.shape[:-2]
        each = len(self.weight.parts) // math.prod(stack)
        axis = () if stack and each == 1 else (each,)
        parts = [
            _scalar(f"{module}.{suffix}", (*part.destination.start[:-2], *((place % each,) if axis else ())))
            for place, (module, part) in enumerate(zip(self.modules, self.weight.parts, strict=True))
        ]
        return self._wanted(suffix, (*stack, *axis), parts, dtype)

    def last(self, suffix: str, *, dtype: str) -> Wanted:
        """The tensor ``suffix``, a scalar, of the last part (of each expert): what engines keep where all are equal."""
        stack = self.weight.shape[:-2]
        parts = [_scalar(f"{module}.{suffix}", place or (0,)) for place, (module, _) in self._last_parts().items()]
        return self._wanted(suffix, stack or (1,), parts, dtype)

    def shape_of_last(self, suffix: str) -> Wanted:
        """The tensor ``suffix``, two integers, of the last part."""
        part = Part(f"{self.modules[-1]}.{suffix}", (2,), whole((2,)), whole((2,)))
        return self._wanted(suffix, (2,), [part], "int64")

    def inputs(self, suffix: str, *, dtype: str) -> Wanted:
        """The tensor ``suffix`` of the last part (of each expert), one element for each input of this rank."""
        parts = []
        for place, (module, part) in self._last_parts().items():
            span = _span(part.shape, part.box, -1)
            box = Box((span.start,), (span.count,))
            at = Box((*place, 0), (*(1 for _ in place), span.count))
            parts.append(Part(f"{module}.{suffix}", (span.total,), box, at))
        return self._wanted(suffix, (*self.weight.shape[:-2], self.weight.shape[-1]), parts, dtype)

    def excuse(self, suffix: str, reason: str) -> dict[str, str]:
        """The tensor ``suffix`` of every part need not be loaded; where it is nevertheless, this does not matter."""
        return {f"{module}.{suffix}": reason for module in self.modules}

    def _last_parts(self) -> dict[Shape, tuple[str, Part]]:
        """Place in the stack → the last part there, and its module."""
        pairs = zip(self.modules, self.weight.parts, strict=True)
        return {part.destination.start[:-2]: (module, part) for module, part in pairs}

    def _wanted(self, suffix: str, shape: Shape, parts: Sequence[Part], dtype: str | None) -> Wanted:
        name = f"{self.weight.name.removesuffix('weight')}{suffix}"
        # Besides the weight's own bits, what is floating point is a scale.
        finite = dtype is None or DTYPES[dtype].castable
        return Wanted(
            name,
            shape,
            self.weight.part_kind,
            tuple(parts),
            dtype=dtype,
            elsewhere=self.weight.elsewhere,
            finite=finite,
        )


class _Cut(NamedTuple):
    """A part of one tensor of a layer: of the ``whole`` in the file, ``box`` goes to ``destination`` in ``shape``."""

    whole: Shape
    box: Box
    destination: Box
    shape: Shape


@lru_cache(maxsize=1024)
def _cut(
    weight: Shape,
    part: Shape,
    box: Box,
    destination: Box,
    rows: Axis,
    columns: Axis,
    transposed: bool,
    inputs_first: bool,
) -> _Cut:
    """How a tensor is cut whose ``rows`` and ``columns`` follow the weight's. All layers of a block ask the same."""
    row, column = (-1, -2) if transposed else (-2, -1)
    ranges = [
        axis.seen(_span(part, box, theirs), _span(weight, destination, ours))
        for axis, theirs, ours in ((rows, row, -2), (columns, column, -1))
    ]
    sources, targets = zip(*(ranges[::-1] if inputs_first else ranges), strict=True)
    return _Cut(
        (*part[:-2], *_shape(sources)),
        _within(box, _box(sources)),
        _within(destination, _box(targets)),
        (*weight[:-2], *_shape(targets)),
    )


def _within(stack: Box, box: Box) -> Box:
    """The box, of the matrices that ``stack`` is of."""
    return Box((*stack.start[:-2], *box.start), (*stack.shape[:-2], *box.shape))


def _scalar(source: str, place: Shape) -> Part:
    return Part(source, (1,), whole((1,)), Box(place, (1,) * len(place)), same_as=((),))


def _span(shape: Shape, box: Box, axis: int) -> _Span:
    return _Span(shape[axis], box.start[axis], box.shape[axis])


def _shape(spans: tuple[_Span, ...]) -> Shape:
    return tuple(span.total for span in spans)


def _box(spans: tuple[_Span, ...]) -> Box:
    return Box(tuple(span.start for span in spans), tuple(span.count for span in spans))
