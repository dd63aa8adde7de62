"""Another generation under a model of vLLM whose parameters are mapped: may it be, and what follows the parameters.

Owns what is known of each model that was given its weights here, what refuses a swap by name (weights that
post-processing has made anew, tensors that were derived from weights), and copying buffers again. Knows nothing of
workers and ranks (``switching.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from weightcached.client.barrier import Stopped
from weightcached.client.comparison import NAMES_SHOWN
from weightcached.client.following import Follower
from weightcached.client.swap import Changed, Staged, Swapped
from weightcached.client.weights import WeightSet
from weightcached.protocol.errors import SwapRefused

if TYPE_CHECKING:
    import torch

_NOT_DERIVED = frozenset({"kv_cache", "_k_scale_cpu", "_v_scale_cpu"})
"""Attributes of modules that are tensors and not computed from weights that are mapped: scales of a cache, where a
checkpoint has some, are weights that post-processing has made anew."""


@dataclass(frozen=True)
class Served:
    """What a model was given."""

    weights: WeightSet
    made_anew: Mapping[str, int]
    """Weights that post-processing has brought into another form, in private memory: name, with ``*`` for numbers."""
    follower: Follower


_served: WeakKeyDictionary[torch.nn.Module, Served] = WeakKeyDictionary()


def remember(model: torch.nn.Module, weights: WeightSet, made_anew: Mapping[str, int]) -> None:
    """``model`` computes with ``weights`` from now on. Does not keep it alive."""
    _served[model] = Served(weights, dict(made_anew), weights.follow())


def served(model: torch.nn.Module) -> Served | None:
    """None where vLLM's own loader has loaded it."""
    return _served.get(model)


def require_swappable(model: torch.nn.Module, given: Served) -> None:
    """Raises SwapRefused, by name, where ``model`` would keep numbers that were made from the weights in use."""
    kept = [*given.made_anew, *_derived(model, given.weights)]
    if kept:
        raise SwapRefused(
            "vLLM has made tensors out of these weights that would stay what they are",
            expected="every weight mapped as it is",
            found=", ".join(kept[:NAMES_SHOWN])
            + (f", and {len(kept) - NAMES_SHOWN} more" if kept[NAMES_SHOWN:] else ""),
            next_step="start the engine again to use the new weights; layout vllm at stage after maps more",
        )


def swap_in(model: torch.nn.Module, given: Served, staged: Staged, stopped: Stopped, *, changed: Changed) -> Swapped:
    """``staged.swap(stopped)`` for the weights of ``model``, and its buffers that are copies of weights anew."""
    import torch

    require_swappable(model, given)
    done = staged.swap(stopped, changed=changed)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name in buffers.keys() & set(given.weights):
            buffers[name].copy_(given.weights[name])
    return done


def _derived(model: torch.nn.Module, weights: WeightSet) -> Iterator[str]:
    """Floating-point tensors that are neither parameters nor buffers nor mapped: vLLM computes them from weights after
    loading (what multi-head latent attention absorbs, say).
    """
    import torch

    storages = {tensor.untyped_storage().data_ptr() for tensor in weights.values() if tensor.numel()}
    for owner, module in model.named_modules():
        for name, value in vars(module).items():
            if (
                isinstance(value, torch.Tensor)
                and name not in _NOT_DERIVED
                and value.is_floating_point()
                and value.numel()
                and value.untyped_storage().data_ptr() not in storages
            ):
                yield f"{owner}.{name}".lstrip(".")
