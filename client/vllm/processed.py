"""Weights that vLLM has post-processed already, in a module that is built as if it had not.

Post-processing replaces parameters by others: more or fewer of them, of other shapes. So whatever the weights have
takes the place of what the module was built with. What is then left over is either removed by post-processing itself,
which vLLM runs in a mode that makes only its Python state anew, or it is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcached.client.weights import WeightSet
from weightcached.protocol.errors import BindError

if TYPE_CHECKING:
    import torch

_NAMES_SHOWN = 20


def bind_processed(model: torch.nn.Module, weights: WeightSet) -> None:
    """Parameters of ``weights`` become those of ``model``, mapped; buffers are copied. Tied names stay one parameter,
    and one that has kept its form stays the object that vLLM made. Raises BindError for names of no module.
    """
    import torch

    modules = dict(model.named_modules(remove_duplicate=False))
    _require(model, [name for name in weights if name.rpartition(".")[0] not in modules], "no such module")
    bound: dict[int, torch.nn.Parameter] = {}
    for name, tensor in weights.items():
        owner, _, leaf = name.rpartition(".")
        module = modules[owner]
        if weights.manifest.row(name).kind == "buffer":
            module._buffers.pop(leaf, None)
            module.register_buffer(leaf, tensor.clone())
            continue
        built = module._parameters.pop(leaf, None)
        parameter = bound.get(id(tensor))
        if parameter is None:
            if built is not None and (built.shape, built.dtype) == (tensor.shape, tensor.dtype):
                parameter = built
                parameter.data = tensor
            else:
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
            bound[id(tensor)] = parameter
        module.register_parameter(leaf, parameter)


def require_processed(model: torch.nn.Module, weights: WeightSet) -> None:
    """Raises BindError for a parameter that is still what the module was built with: its values are nobody's."""
    names = model.named_parameters(remove_duplicate=False)
    _require(model, [name for name, tensor in names if tensor.numel() and name not in weights], "not in the weights")


def _require(model: torch.nn.Module, names: list[str], problem: str) -> None:
    if names:
        raise BindError(
            "post-processed weights do not fit the module",
            expected="the same model, of the same vLLM",
            found=f"{problem}: {', '.join(names[:_NAMES_SHOWN])}"
            + (f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""),
            where=type(model).__name__,
        )
