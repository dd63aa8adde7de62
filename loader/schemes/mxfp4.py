"""MXFP4, as GPT-OSS has it: experts in four bits with one exponent for each 32 inputs; everything else is plain.

The file has ``<projection>_blocks`` ``[experts, out, in / 32, 16]`` (two values a byte) and ``<projection>_scales``
``[experts, out, in / 32]``; engines hold the same bytes as ``w13_weight`` ``[experts, out, in / 2]`` and
``w13_weight_scale``. Ranks share whole blocks of 32: where an engine would round their number up and pad, the share is
refused here. What engines pad for a kernel's sake is not part of the layout.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from weightcached.loader.architectures.rows import Wanted
from weightcached.loader.schemes.linear import EACH, Axis, Linear, Quantized, Scheme
from weightcached.loader.schemes.settings import Settings

BLOCK = 32
BLOCK_NBYTES = 16


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """``quant_method`` mxfp4, and its only scheme."""

    kv_scale: None = None

    @classmethod
    def of(cls, settings: Settings) -> Mxfp4:
        return cls()

    def scheme_of(self, module: str, present: Container[str]) -> Scheme | None:
        return self if "experts" in module.split(".") else None

    def quantized(self, layer: Linear) -> Quantized:
        values = layer.tensor("weight", EACH, Axis(2, "byte"), dtype="uint8", ending="_blocks")
        scales = layer.tensor("weight_scale", EACH, Axis(BLOCK, "block"), dtype="uint8", ending="_scales")
        return Quantized((_in_blocks(values), scales))


def _in_blocks(values: Wanted) -> Wanted:
    """The file has an axis more: ``[…, in / 32, 16]`` for ``[…, in / 2]``."""
    parts = []
    for part in values.parts:
        *others, nbytes = part.shape
        parts.append(replace(part, same_as=((*others, nbytes // BLOCK_NBYTES, BLOCK_NBYTES),)))
    return replace(values, parts=tuple(parts))
