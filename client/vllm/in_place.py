"""A model of vLLM with its parameters in mapped memory, before and after vLLM's own post-processing.

Owns binding into a module as vLLM builds it, and what keeps post-processing from copying: on a CPU vLLM packs the
weight of each linear layer for its kernels, into memory of its own, and empties the parameter. For parameters that are
mapped this is left out, and the layer multiplies with the mapped matrix itself. What post-processing has to make anew
(experts and quantized layers in a kernel's order) is private memory: it is counted here, and said.

The module is built on its device, not on the meta device: its buffers and the initial values of what no checkpoint has
are needed. In host memory an ``empty`` parameter takes nothing until somebody writes to it; `on_gpu.py` has the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightcached.client.bind import BindReport, bind
from weightcached.client.weights import WeightSet
from weightcached.protocol.errors import BindError, UnsupportedModel
from weightcached.protocol.text import folded

if TYPE_CHECKING:
    import torch


def require_servable(model: torch.nn.Module) -> None:
    """Raises UnsupportedModel, by name, for what cannot have its parameters from a daemon."""
    methods = {type(module.quant_method).__name__ for module in model.modules() if _quantizes_while_loading(module)}
    if methods:
        raise UnsupportedModel(
            "vLLM is told to quantize this model while it loads it, and with the cache it loads nothing",
            found=", ".join(sorted(methods)),
            next_step="leave --quantization out, or use weight_cache_mode 'off'",
        )


def _quantizes_while_loading(module: Any) -> bool:
    return bool(getattr(getattr(module, "quant_method", None), "uses_meta_device", False))


def bind_in_place(model: torch.nn.Module, weights: WeightSet, *, lacks_scales: bool) -> BindReport:
    """Map every parameter of ``model``, each staying the object that vLLM made, with its class and attributes.

    With ``lacks_scales``, those of attention caches that the weights do not have stay what vLLM starts from. Raises
    BindError.
    """
    try:
        return bind(model, weights, keep_missing=_scales_of_caches(model) if lacks_scales else ())
    except BindError as error:
        raise BindError(
            error.message,
            expected=error.expected,
            found=error.found,
            where=error.where,
            next_step="where dtypes differ, serve with the --dtype that vLLM computes in and give the loader the same "
            '"dtype"; where names differ, this vLLM and the layout are of different versions',
        ) from error


def _scales_of_caches(model: torch.nn.Module) -> set[str]:
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return {
        f"{owner}.{name}"
        for owner, module in model.named_modules(remove_duplicate=False)
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
        for name, _ in module.named_parameters(recurse=False)
    }


@contextmanager
def without_packing() -> Iterator[None]:
    """vLLM's post-processing in this block leaves matrices that are mapped where they are.

    vLLM looks up the function that packs whenever it packs; in this block it finds one that asks first. Its own switch
    (``_cpu_skip_gemm_dispatch``) does the same for linear layers, but not for embeddings and heads.
    """
    import torch
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            packing(layer, remove_weight=remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packing


@dataclass(frozen=True)
class Sharing:
    """What has become of the weights, by their bytes in mapped memory. Tied ones are counted once."""

    nbytes_shared: int
    """Of those that parameters of the model still are."""
    made_anew: dict[str, int]
    """Those that are no parameter's memory any more, because a kernel wanted another form of them: name, with ``*`` for
    numbers, to bytes in all layers."""


def sharing_of(model: torch.nn.Module, weights: WeightSet) -> Sharing:
    """Look at every parameter of ``model`` as it is now."""
    places = {(parameter.data_ptr(), parameter.nbytes) for parameter in model.parameters() if parameter.nbytes}
    shared: set[tuple[int, int]] = set()
    made_anew: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.nbytes)
        if not tensor.nbytes or place in seen:
            continue
        seen.add(place)
        if place in places:
            shared.add(place)
        elif weights.manifest.row(name).kind == "parameter":
            made_anew[folded(name)] = made_anew.get(folded(name), 0) + tensor.nbytes
    return Sharing(sum(nbytes for _, nbytes in shared), made_anew)
