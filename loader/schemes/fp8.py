"""Weights of one byte an element with scales of floating point: fp8, and int8 as compressed-tensors stores it.

Names, shapes and dtypes are vLLM's after loading and before its kernels' post-processing: with one scale for a tensor,
a fused layer keeps each part's own in a slot (``[q, k, v]``), and its weight stays as quantized. Engines requantize
the parts to the largest of the slots afterwards, each to its own kernel's taste.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from weightcached.loader.schemes.linear import ONE, KvScale, Linear, Quantized, Scheme, blocks
from weightcached.loader.schemes.settings import Patterns, Settings

Granularity = Literal["tensor", "channel"] | tuple[int, int]
"""One scale for a matrix, for an output row, or for a block of (rows, columns)."""


KV_SCALE = KvScale((), None)


@dataclass(frozen=True, slots=True)
class OneByte:
    """A weight of ``dtype`` and float32 scales named ``scale``."""

    dtype: Literal["float8_e4m3fn", "int8"]
    granularity: Granularity
    scale: str = "weight_scale"
    static_inputs: bool = False
    """The checkpoint has a scale for each part's inputs, too."""
    input_zero_point: bool = False

    def quantized(self, layer: Linear) -> Quantized:
        parameters = [layer.tensor("weight", dtype=self.dtype)]
        if self.granularity == "tensor":
            parameters.append(layer.slots(self.scale, dtype="float32"))
        elif self.granularity == "channel":
            parameters.append(layer.tensor(self.scale, columns=ONE, dtype="float32"))
        else:
            rows, columns = self.granularity
            parameters.append(layer.tensor(self.scale, blocks(rows), blocks(columns), dtype="float32"))
        if not self.static_inputs:
            return Quantized(tuple(parameters))
        if self.dtype == "float8_e4m3fn" and not layer.is_stacked:
            return Quantized((*parameters, layer.slots("input_scale", dtype="float32")))
        # Engines give experts, and int8 layers, one input scale, where the last part loaded wins: parts share inputs.
        reason = "the layer has one of these, its last part's: all parts have the same inputs"
        parameters.append(layer.last("input_scale", dtype="float32"))
        excuses = layer.excuse("input_scale", reason)
        if self.input_zero_point:
            parameters.append(layer.last("input_zero_point", dtype="int8"))
            excuses |= layer.excuse("input_zero_point", reason)
        return Quantized(tuple(parameters), excuses)


@dataclass(frozen=True, slots=True)
class Fp8:
    """``quant_method`` fp8: one scale for a tensor (``weight_scale``) or for a block (``weight_scale_inv``)."""

    scheme: OneByte
    plain: Patterns
    kv_scale: KvScale = KV_SCALE

    @classmethod
    def of(cls, settings: Settings) -> Fp8:
        settings.require("activation_scheme", "static", "dynamic")
        static = settings.text("activation_scheme") == "static"
        scheme = OneByte("float8_e4m3fn", "tensor", static_inputs=static)
        if settings.values.get("weight_block_size") is not None:
            settings.require("activation_scheme", "dynamic")  # scales for blocks have no static ones beside them
            scheme = OneByte("float8_e4m3fn", settings.pair("weight_block_size"), "weight_scale_inv")
        return cls(scheme, settings.patterns("ignored_layers", "modules_to_not_convert"))

    def scheme_of(self, module: str, present: Container[str]) -> Scheme | None:
        return None if self.plain.name(module) else self.scheme
