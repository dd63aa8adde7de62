"""Another generation under a model of Transformers that is bound to a weight set.

Owns what has to follow its parameters when they are exchanged: buffers that were copied from the weights are copied
again. What else was computed from the old weights (a cache of attention, prompts' hidden states) is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from weightcached.client.barrier import Stopped
from weightcached.client.comparison import NAMES_SHOWN
from weightcached.client.swap import Changed, Staged, Swapped
from weightcached.protocol.errors import SwapRefused

if TYPE_CHECKING:
    import torch

    from weightcached.client.weights import WeightSet

_copied: WeakKeyDictionary[Any, Sequence[tuple[torch.Tensor, torch.Tensor]]] = WeakKeyDictionary()


def remember_copies(model: Any, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """(a buffer's own memory, where it was copied from) of ``model``, for :func:`swap_in`."""
    _copied[model] = tuple(copies)


def swap_in(
    model: Any, weights: WeightSet, staged: Staged, stopped: Stopped, *, changed: Changed = "refuse"
) -> Swapped:
    """``staged.swap(stopped)`` for ``weights``, which ``model`` is bound to, and its buffers anew.

    Raises what :meth:`Staged.swap` raises, and SwapRefused, with nothing exchanged, where ``model`` has parameters of
    its own that Transformers made as copies of others: they would stay those of the old generation.
    """
    own = _parameters_of_its_own(model, weights)
    if own:
        raise SwapRefused(
            f"{type(model).__name__} has {len(own)} parameters that do not lie in the weights' memory",
            expected="every parameter mapped",
            found=", ".join(own[:NAMES_SHOWN]),
            next_step="load the model again to use the new weights",
        )
    done = staged.swap(stopped, changed=changed)
    import torch

    with torch.no_grad():
        for own_memory, source in _copied.get(model, ()):
            own_memory.copy_(source)
    return done


def _parameters_of_its_own(model: Any, weights: WeightSet) -> list[str]:
    storages = {tensor.untyped_storage().data_ptr() for tensor in weights.values() if tensor.numel()}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.numel() and parameter.untyped_storage().data_ptr() not in storages
    ]
