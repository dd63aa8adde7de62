"""A linear layer as a quantization scheme sees it: the weight's cut, and what follows from it for the other tensors.

Pure. Tables cut one weight ``[out, in]`` into boxes and know nothing of quantization. A scheme says how each axis of
the weight shows in each tensor that it keeps instead (packed eight to an integer, one scale for a group), and the
boxes follow. What does not align with this rank's share is refused; no scale is ever the neighbour's.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weightcached.loader.architectures.rows import Part, Wanted
from weightcached.loader.boxes import Box, Shape, whole
from weightcached.loader.schemes.axes import EACH, Axis, Matrix, Misaligned, cut
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
    def is_stack_on_disk(self) -> bool:
        """Whether these are experts that the file has in one tensor."""
        return len(self.weight.parts[0].shape) > 2

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
        if (suffix, rows, columns, inputs_first, ending) == ("weight", EACH, EACH, False, None):
            return self._wanted(suffix, self.weight.shape, self.weight.parts, dtype)
        stack, shape, parts = self.weight.shape[:-2], self.weight.shape, []
        for module, part in zip(self.modules, self.weight.parts, strict=True):
            name = f"{module}.{suffix}" if ending is None else f"{module}{ending}"
            try:
                made = cut(Matrix.of(self.weight, part), rows, columns, inputs_first)
            except Misaligned as fault:
                raise _misaligned(part.source, name, fault, is_of_experts=bool(stack)) from None
            shape = (*stack, *made.shape)
            parts.append(made.stacked(name, part) if stack else Part(name, made.whole, made.box, made.destination))
        return self._wanted(suffix, shape, parts, dtype)

    def slots(self, suffix: str, *, dtype: str) -> Wanted:
        """The tensor ``suffix``, a scalar of each part, side by side; experts of one part each have no axis for it.

        A scalar of parts that are fused in the file is each one's.
        """
        stack = self.weight.shape[:-2]
        layers = [
            (module, part)
            for module, part in zip(self.modules, self.weight.parts, strict=True)
            for _ in range(part.layers)
        ]
        each = len(layers) // math.prod(stack)
        axis = () if stack and each == 1 else (each,)
        parts = [
            _scalar(f"{module}.{suffix}", (*part.destination.start[:-2], *((place % each,) if axis else ())))
            for place, (module, part) in enumerate(layers)
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
            count = part.box.shape[-1]
            box, at = Box((part.box.start[-1],), (count,)), Box((*place, 0), (*(1 for _ in place), count))
            parts.append(Part(f"{module}.{suffix}", (part.shape[-1],), box, at))
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


def _scalar(source: str, place: Shape) -> Part:
    return Part(source, (1,), whole((1,)), Box(place, (1,) * len(place)), same_as=((),))


def _misaligned(weight: str, tensor: str, fault: Misaligned, *, is_of_experts: bool) -> UnsupportedModel:
    source, axis = fault.source, fault.axis
    whole = " or whole experts on each rank (--ep-size)," if is_of_experts else ""
    return UnsupportedModel(
        f"this rank's share of {weight} does not align with {tensor}: {fault}",
        expected=f"shares that are whole {axis.unit}s of {axis.per}",
        found=f"elements {source.start} to {source.start + source.count} of the checkpoint's {source.total}, "
        f"from {fault.target.start} on in the fused layer",
        next_step=f"use a smaller TP size,{whole} or a checkpoint that is not quantized",
    )
