"""Checkpoints that are quantized already: from ``quantization_config`` to the parameters that engines hold.

One module for each scheme. Pure. What a rank holds is what vLLM holds after its loader and before the kernels'
post-processing: the checkpoint's own integers and scales, cut and fused, never dequantized. Called by `fused.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from weightcached.loader.architectures.rows import Wanted
from weightcached.loader.schemes import kv_cache
from weightcached.loader.schemes.awq import Awq
from weightcached.loader.schemes.compressed_tensors import CompressedTensors
from weightcached.loader.schemes.fp8 import Fp8
from weightcached.loader.schemes.gptq import Gptq
from weightcached.loader.schemes.kv_cache import attention_of, kv_scales, zero_points
from weightcached.loader.schemes.linear import Linear, Method, Quantized, Scheme
from weightcached.loader.schemes.mxfp4 import Mxfp4
from weightcached.loader.schemes.settings import Settings
from weightcached.protocol.errors import UnsupportedModel
from weightcached.protocol.text import shown

METHODS: Mapping[str, Callable[[Settings], Method]] = {
    "awq": Awq.of,
    "compressed-tensors": CompressedTensors.of,
    "fp8": Fp8.of,
    "gptq": Gptq.of,
    "mxfp4": Mxfp4.of,
}
"""``quant_method`` → what reads its settings."""


def method_of(model: Mapping[str, Any]) -> Method | None:
    """What ``config.json`` says of quantization; ``None`` is a plain checkpoint.

    Raises ModelConfigError for settings that cannot be read, UnsupportedModel for those that are not supported.
    """
    if model.get("quantization_config") is None:
        return None
    settings = Settings.of(model["quantization_config"], "quantization_config")
    name = settings.text("quant_method")
    if name not in METHODS:
        raise UnsupportedModel(
            f"the checkpoint is quantized with {shown(name)}, which layout 'fused' does not take",
            expected=", ".join(METHODS),
            found=shown(name),
            next_step="name another checkpoint of the model, or use --layout hf at TP size 1",
        )
    return METHODS[name](settings)


def quantized(wanted: Iterable[Wanted], method: Method, present: Collection[str]) -> Quantized:
    """``wanted`` with each quantized linear layer's weight replaced by what the checkpoint has in its stead.

    ``present``: the checkpoint's tensor names. Raises UnsupportedModel where parts that are fused are not quantized
    alike or a share does not align, UnexpectedTensor when a KV-cache scale is there twice.
    """
    parameters: list[Wanted] = []
    excuses: dict[str, str] = {}
    for one in wanted:
        layer = Linear(one)
        scheme = _scheme_of(layer, method, present) if one.linear else None
        if scheme is None:
            parameters.append(one)
            continue
        if any(part.transposed for part in one.parts) and not isinstance(scheme, Mxfp4):
            raise UnsupportedModel(
                f"{layer.name} is transposed in plain checkpoints, and how in quantized ones is not known",
                expected="a checkpoint that is not quantized",
                found=shown(scheme),
            )
        if layer.is_stack_on_disk and not isinstance(scheme, Mxfp4):
            raise UnsupportedModel(
                f"{layer.modules[0]} has all experts in one tensor, and how quantized ones lie in it is not known",
                expected="a tensor for each projection of each expert, or a checkpoint that is not quantized",
                next_step="save the model with a tensor for each expert (Transformers: save_original_format=True)",
            )
        made = scheme.quantized(layer)
        parameters.extend(made.parameters)
        excuses.update(made.excuses)
    if method.kv_scale is not None:
        candidates = {name for name in present if name.endswith(kv_cache.ENDINGS)}
        left = candidates.difference(part.source for one in parameters for part in one.parts)
        if left:
            attentions = {
                part.source.rsplit(".", 2)[0]: one.name.rsplit(".", 2)[0] for one in parameters for part in one.parts
            }
            parameters.extend(kv_scales(left, attentions, method.kv_scale))
            excuses.update(zero_points(left, attentions))
    return Quantized(tuple(parameters), excuses)


def beside(ignored: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Excuses for those of ``names`` that belong to a layer whose weight is ``ignored``, for the same reason.

    Other ranks' layers are known by their weights' plain names; what stands for a weight and goes with it follows.
    """
    attentions = {name.rsplit(".", 2)[0]: reason for name, reason in ignored.items()}
    found = {}
    for name in names:
        reason = (
            ignored.get(f"{name.rpartition('.')[0]}.weight")
            or ignored.get(name.rpartition("_")[0])  # stacked experts' names have no ".weight"
            or attentions.get(attention_of(name) or "")
        )
        if reason is not None:
            found[name] = reason
    return found


def _scheme_of(layer: Linear, method: Method, present: Collection[str]) -> Scheme | None:
    schemes = [method.scheme_of(module, present) for module in layer.modules]
    if any(scheme != schemes[0] for scheme in schemes):
        raise UnsupportedModel(
            f"the parts of {layer.name} are not quantized alike, so they cannot be fused",
            expected="one scheme",
            found="; ".join(
                f"{module}: {scheme or 'plain'}" for module, scheme in zip(layer.modules, schemes, strict=True)
            ),
            next_step="use --layout hf at TP size 1, or another checkpoint",
        )
    return schemes[0]
