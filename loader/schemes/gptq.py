"""GPTQ: integers of 2, 4 or 8 bits in groups of inputs, weights packed along the inputs, zero points along the outputs.

Tensors lie ``[in, out]``: ``qweight`` ``[in / n, out]``, ``qzeros`` ``[in / group, out / n]``, ``scales``
``[in / group, out]``. With activation order (``desc_act``) input i is of group ``g_idx[i]``, any group: a rank that
has some of the inputs needs the scales of all groups, and ``g_idx`` of its inputs. Without, ``g_idx`` says nothing.
vLLM 0.32 takes no activation order with groups; what is kept for it here is what earlier releases and others hold.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weightcached.loader.schemes.linear import EACH, Linear, Quantized, Scheme, groups, packed
from weightcached.loader.schemes.settings import Patterns, Settings, is_match


@dataclass(frozen=True, slots=True)
class GptqScheme:
    bits: int
    group_size: int
    activation_order: bool

    @classmethod
    def of(cls, settings: Settings) -> GptqScheme:
        settings.require("bits", 2, 4, 8)
        size = settings.number("group_size", least=-1)
        # One group for all inputs: their order changes nothing.
        return cls(settings.number("bits"), size, settings.flag("desc_act") and size != -1)

    def quantized(self, layer: Linear) -> Quantized:
        integers, group = packed(32 // self.bits), groups(self.group_size, uncut=self.activation_order)
        parameters = [
            layer.tensor("qweight", EACH, integers, dtype="int32", inputs_first=True),
            layer.tensor("qzeros", integers, group, dtype="int32", inputs_first=True),
            layer.tensor("scales", EACH, group, dtype=None, inputs_first=True),
        ]
        excuses = layer.excuse("bias", "GPTQ writes a bias for every layer; the architecture has none here")
        if self.activation_order:
            parameters.append(layer.inputs("g_idx", dtype="int32"))
            # The order follows from the inputs alone, and all parts of a layer have the same.
            excuses |= layer.excuse("g_idx", "the layer has one of these, its last part's")
        else:
            reason = "without desc_act, groups follow one another: g_idx says no more than group_size"
            excuses |= layer.excuse("g_idx", reason)
        return Quantized(tuple(parameters), excuses)


@dataclass(frozen=True, slots=True)
class Gptq:
    """``quant_method`` gptq: one scheme, and GPTQModel's ``dynamic`` rules that change it for some modules."""

    settings: Settings
    scheme: GptqScheme
    modules: Patterns
    """Where not empty, only these are quantized."""
    dynamic: tuple[tuple[str, Any], ...]
    """``-:`` expression: plain. ``+:`` or plain expression: other settings."""
    kv_scale: None = None

    @classmethod
    def of(cls, settings: Settings) -> Gptq:
        settings.require("checkpoint_format", None, "", "gptq", "gptq_v2")
        settings.require("lm_head", None, False)
        dynamic = settings.within("dynamic")
        return cls(
            settings,
            GptqScheme.of(settings),
            settings.patterns("modules_in_block_to_quantize"),
            () if dynamic is None else tuple(dynamic.values.items()),
        )

    def scheme_of(self, module: str, present: Container[str]) -> Scheme | None:
        for expression, changes in self.dynamic:
            if expression.startswith("-:") and is_match(module, expression[2:]):
                return None
            if is_match(module, expression.removeprefix("+:")) and isinstance(changes, Mapping):
                changed = replace(self.settings, values={**self.settings.values, **changes})
                return GptqScheme.of(changed)
        if self.modules:
            return self.scheme if self.modules.name(module) else None
        return self.scheme if f"{module}.weight" not in present or f"{module}.qweight" in present else None
