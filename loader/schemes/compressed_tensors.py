"""compressed-tensors: groups of modules, each with its own scheme: fp8, int8, or integers packed into int32.

Packed (``pack-quantized``) tensors lie ``[out, in]``: ``weight_packed`` ``[out, in / n]``, ``weight_scale``
``[out, groups]``, ``weight_zero_point`` ``[out / n, groups]`` packed along the outputs, ``weight_shape`` (of the last
part of a fused layer, before it was cut). With activation order by group, input i is of group ``weight_g_idx[i]``:
a rank that has some of the inputs needs the scales of all groups (vLLM 0.32 takes no such order; earlier ones did).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from weightcached.loader.schemes.fp8 import Granularity, OneByte
from weightcached.loader.schemes.linear import EACH, KvScale, Linear, Quantized, Scheme, groups, packed
from weightcached.loader.schemes.settings import Patterns, Settings
from weightcached.protocol.errors import UnsupportedModel

ANY_LINEAR = "Linear"
"""The class of layers that a group targets where it names no module."""

KV_SCALE = KvScale((1,), "float32")


@dataclass(frozen=True, slots=True)
class Packed:
    """Integers of ``bits`` bits packed along the inputs."""

    bits: int
    group_size: int
    zero_points: bool
    activation_order: bool

    def quantized(self, layer: Linear) -> Quantized:
        integers, group = packed(32 // self.bits), groups(self.group_size, uncut=self.activation_order)
        parameters = [
            layer.tensor("weight_packed", EACH, integers, dtype="int32"),
            layer.tensor("weight_scale", EACH, group, dtype=None),
        ]
        if not layer.is_stacked:
            parameters.append(layer.shape_of_last("weight_shape"))
        excuses = layer.excuse("weight_shape", "a fused layer has one of these, its last part's; experts have none")
        if self.zero_points:
            parameters.append(layer.tensor("weight_zero_point", integers, group, dtype="int32"))
        if self.activation_order:
            parameters.append(layer.inputs("weight_g_idx", dtype="int32"))
            # The order follows from the inputs alone, and all parts of a layer have the same.
            excuses |= layer.excuse("weight_g_idx", "the layer has one of these, its last part's")
        return Quantized(tuple(parameters), excuses)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """``quant_method`` compressed-tensors: (targets, scheme) of each group, and the modules that are left plain."""

    groups: tuple[tuple[Patterns, Scheme], ...]
    plain: Patterns
    kv_scale: KvScale = KV_SCALE

    @classmethod
    def of(cls, settings: Settings) -> CompressedTensors:
        for unknown in ("transform_config", "sparsity_config"):
            settings.require(unknown, None, {})
        cache = settings.within("kv_cache_scheme")
        if cache is not None:
            cache.require("type", "float")
            cache.require("num_bits", 8)
            cache.require("strategy", "tensor")
        config_groups = settings.within("config_groups") or Settings({}, f"{settings.path}.config_groups")
        schemes = []
        for name in config_groups.values:
            group = config_groups.within(name)
            # A group of attention modules describes the KV cache, whose scales are parameters of their own.
            if group is not None and not all(target.endswith("Attention") for target in group.names("targets")):
                schemes.append((group.patterns("targets"), _scheme(group, settings.text("format"))))
        return cls(tuple(schemes), settings.patterns("ignore"))

    def scheme_of(self, module: str, present: Container[str]) -> Scheme | None:
        if self.plain.name(module):
            return None
        named = (scheme for targets, scheme in self.groups if targets.name(module))
        any_linear = (scheme for targets, scheme in self.groups if ANY_LINEAR in targets.words)
        return next(named, None) or next(any_linear, None)


def _scheme(group: Settings, default_format: str) -> Scheme:
    """The scheme that a group's ``weights`` and ``input_activations`` describe. Raises UnsupportedModel."""
    weights, inputs = group.within("weights"), group.within("input_activations")
    if weights is None:
        raise UnsupportedModel(
            f"the checkpoint's {group.path} quantizes no weights", expected="an object", found="null"
        )
    group.require("output_activations", None)
    weights.require("dynamic", None, False)
    kind, bits = weights.text("type", "int"), weights.number("num_bits")
    form = group.text("format", default_format)
    if kind == "int" and form == "pack-quantized" and inputs is None:
        return _packed(weights, bits)
    one_byte = {"float": ("float-quantized", "naive-quantized"), "int": ("int-quantized", "naive-quantized")}
    if bits == 8 and form in one_byte.get(kind, ()):
        weights.require("symmetric", None, True)
        return _one_byte(weights, inputs, is_float=kind == "float")
    raise UnsupportedModel(
        f"the checkpoint's {group.path} is quantized in a way that is not supported",
        expected="format float-quantized or int-quantized with weights of 8 bits, or pack-quantized with weights of "
        "2, 4 or 8 bits and no input_activations",
        found=f"format {form}, weights of type {kind} with {bits} bits",
        next_step="use --layout hf at TP size 1, or another checkpoint",
    )


def _packed(weights: Settings, bits: int) -> Packed:
    weights.require("num_bits", 2, 4, 8)
    weights.require("strategy", "group", "channel")
    weights.require("actorder", None, "group", "dynamic", "weight", "static")
    size = weights.number("group_size") if weights.text("strategy") == "group" else -1
    by_group = size != -1 and weights.text("actorder") in ("group", "dynamic")
    return Packed(bits, size, not weights.flag("symmetric", default=True), by_group)


def _one_byte(weights: Settings, inputs: Settings | None, *, is_float: bool) -> OneByte:
    strategies = ("tensor", "channel", "block") if is_float else ("tensor", "channel")
    weights.require("strategy", *strategies)
    granularity: Granularity = "tensor" if weights.text("strategy") == "tensor" else "channel"
    if weights.text("strategy") == "block":
        granularity = weights.pair("block_structure")
    if inputs is None:
        return OneByte("float8_e4m3fn" if is_float else "int8", granularity)
    inputs.require("type", "float" if is_float else "int")
    inputs.require("num_bits", 8)
    static = not inputs.flag("dynamic")
    if static:
        inputs.require("strategy", "tensor")
    with_zero = static and not is_float and not inputs.flag("symmetric", default=True)
    return OneByte("float8_e4m3fn" if is_float else "int8", granularity, "weight_scale", static, with_zero)
