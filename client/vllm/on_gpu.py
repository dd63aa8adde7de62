"""What is different where vLLM computes on a GPU: mapped weights cannot be written to, and a parameter takes memory.

Owns building a model that takes none for what is going to be mapped, and copies for layers whose post-processing may
write: a write to mapped memory of a GPU costs the process its context. Nothing of it has run on a GPU; the same steps
are compared with vLLM's own on a CPU (tests/engines/test_vllm_on_gpu.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weightcached.client.weights import WeightSet

if TYPE_CHECKING:
    import torch

LARGE_NBYTES = 1 << 20
"""Smaller parameters keep what they are built with: scales have initial values, which a checkpoint may lack."""


@contextmanager
def parameters_unfilled() -> Iterator[None]:
    """Layers that are built in this block, by this thread, give the memory of their large parameters back as soon as
    they have it. A parameter stays the object that it is, with its class, form and attributes; all its elements are
    one. It has to be bound before anybody computes with it or writes to it.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    thread = threading.get_ident()

    def give_back(module: torch.nn.Module, _: str, parameter: torch.nn.Parameter | None) -> None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return
        if parameter.nbytes >= LARGE_NBYTES and _method_of(module) is not None:
            parameter.data = parameter.data.new_empty(1).expand(parameter.shape)

    handle = register_module_parameter_registration_hook(give_back)
    try:
        yield
    finally:
        handle.remove()


def give_copies(model: torch.nn.Module, weights: WeightSet) -> int:
    """Mapped parameters of layers that post-processing does more to than to look at become copies. How many bytes.

    Unquantized linear layers and embeddings stay mapped: on a GPU vLLM computes with them as they lie.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    mapped = {tensor.untyped_storage().data_ptr() for tensor in weights.values() if tensor.numel()}
    nbytes = 0
    for module in model.modules():
        if type(_method_of(module)) in (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            continue
        for parameter in module.parameters():
            if parameter.numel() and parameter.untyped_storage().data_ptr() in mapped:
                parameter.data = parameter.data.clone()
                nbytes += parameter.nbytes
    return nbytes


def _method_of(module: torch.nn.Module) -> Any:
    """How vLLM computes with the layer's weights; None for a module that is no such layer."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None
