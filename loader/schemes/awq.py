"""AWQ: integers of four bits in groups of inputs, with zero points; everything packed along the outputs.

Tensors lie ``[in, out]``: ``qweight`` ``[in, out / 8]``, ``qzeros`` ``[in / group, out / 8]``, ``scales``
``[in / group, out]``. They stay in AWQ's own order of nibbles, as engines hold them before they repack for a kernel.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from weightcached.loader.schemes.linear import EACH, Linear, Quantized, Scheme, groups, packed
from weightcached.loader.schemes.settings import Patterns, Settings


@dataclass(frozen=True, slots=True)
class Awq:
    """``quant_method`` awq, and its only scheme."""

    group_size: int
    plain: Patterns
    kv_scale: None = None

    @classmethod
    def of(cls, settings: Settings) -> Awq:
        settings.require("w_bit" if "w_bit" in settings.values else "bits", 4)
        settings.require("zero_point", True)
        settings.require("version", None, "gemm", "GEMM")
        settings.require("lm_head", None, False)
        return cls(settings.number("q_group_size", "group_size", least=-1), settings.patterns("modules_to_not_convert"))

    def scheme_of(self, module: str, present: Container[str]) -> Scheme | None:
        if self.plain:
            return None if self.plain.name(module) else self
        return self if f"{module}.weight" not in present or f"{module}.qweight" in present else None

    def quantized(self, layer: Linear) -> Quantized:
        return Quantized(
            (
                layer.tensor("qweight", packed(8), EACH, dtype="int32", inputs_first=True),
                layer.tensor("qzeros", packed(8), groups(self.group_size), dtype="int32", inputs_first=True),
                layer.tensor("scales", EACH, groups(self.group_size), dtype=None, inputs_first=True),
            )
        )
