"""The load plan's words: copies, transforms, parameters. Data only; `plan.py` makes it, executors carry it out.

Everything here is frozen, made from headers, and knows neither files' bytes nor torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from weightcached.loader.accounting import Accounting
from weightcached.loader.boxes import Box, Shape
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.quantization import Quantization

PartKind = Literal["column", "row", "vocabulary", "replicated", "experts"]
"""How ranks share a parameter: rows, columns or vocabulary rows each, a full copy each, or whole experts each."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a safetensors header says of one tensor. ``file`` is a name within the checkpoint directory."""

    name: str
    dtype: str
    """Our (torch's) name: ``bfloat16``."""
    shape: Shape
    file: str
    offset: int
    """Absolute byte offset in the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """The elements of ``source``, a box of the tensor, become those of ``destination``, a box of the parameter.

    In C order. The boxes have equal shapes, axes of length one aside, and are never empty.
    """

    tensor: TensorHeader
    source: Box
    destination: Box
    transposed: bool = False
    """The last two axes of ``source`` are swapped first: the tensor holds ``[in, out]``, the parameter ``[out, in]``.
    Both boxes then have these axes, whatever their lengths."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Convert elements to ``dtype``, to nearest even."""

    dtype: str
    finite: bool = False
    """Refuse what is not finite then: scales."""


@dataclass(frozen=True, slots=True)
class Product:
    """A parameter that quantizing a weight ``[…, out, in]`` writes.

    Each matrix of the weight has an equal share of it, in order. ``rows``: one row of that share stands for so many
    of the matrix's rows, the last for what is left. Without ``rows`` the share is one value for all of them.
    """

    name: str
    shape: Shape
    dtype: str
    rows: int | None = 1


@dataclass(frozen=True, slots=True)
class Quantize:
    """Quantize the copied weight, of ``shape`` ``[…, out, in]``, each of its matrices ``[out, in]`` on its own.

    ``products`` are all that is written, the parameter that has the copies first. Reads the checkpoint's own values
    (``source_dtype``), not cast ones.
    """

    method: Quantization
    shape: Shape
    products: tuple[Product, ...]

    @property
    def rows_together(self) -> int:
        """Rows of a matrix that have a scale or an integer in common: they are quantized together."""
        return math.lcm(*(product.rows for product in self.products if product.rows is not None))


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """One parameter of this rank: its local shape, its dtype in the segment, and where each element comes from.

    ``copies`` and ``zeros`` together are every element exactly once, except where ``alias_of`` or ``produced_by`` is
    set: then both are empty.
    """

    name: str
    shape: Shape
    dtype: str
    """As stored in the segment."""
    source_dtype: str | None
    """Of all copies; ``None`` when there are none."""
    copies: tuple[Copy, ...]
    zeros: tuple[Box, ...] = ()
    """Padding."""
    transform: Cast | Quantize | None = None
    alias_of: str | None = None
    """The parameter whose place this one shares."""
    produced_by: str | None = None
    """The weight whose quantization writes this."""
    part_kind: PartKind = "replicated"
    kind: Literal["parameter"] = "parameter"
    persistent: bool = True

    @property
    def source_shape(self) -> Shape:
        """What ``copies`` and ``zeros`` fill: the shape before the transform."""
        return self.transform.shape if isinstance(self.transform, Quantize) else self.shape


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All parameters of one rank, in the order the layout fixes, and the account of the checkpoint's names."""

    config: CacheConfig
    parameters: tuple[PlannedParameter, ...]
    accounting: Accounting
