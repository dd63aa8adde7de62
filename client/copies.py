"""Weights in memory of the consumer's own, one after another: what an engine's ``load_weights`` takes.

Owns the order and the copying, which `WeightSet.copies` offers. A weight set's other ways give views of the mapped
memory; what comes from here shares nothing with it, and outlives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from weightcached.protocol.manifest import Manifest

if TYPE_CHECKING:
    import torch

    from weightcached.client.weights import WeightSet


def copies(weights: WeightSet, *, reuse_memory: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """See `WeightSet.copies`. What is asked for after the set was closed is a ValueError."""
    room: torch.Tensor | None = None
    target, own = "", None
    for name, place in in_memory_order(weights.manifest):
        source = weights[name]
        if own is None or place != target:
            del own  # before there is another: one copy is alive at a time, and those that the consumer keeps
            flat = _extent(source)
            if reuse_memory:
                room = _room(weights.manifest, source) if room is None else room
                own = room[: flat.nbytes].view(flat.dtype)
                own.copy_(flat)
            else:
                own = flat.clone()
            target = place
        yield name, own.as_strided(source.shape, source.stride())


def in_memory_order(manifest: Manifest) -> list[tuple[str, str]]:
    """(name, name of the row whose place it is) of every row, as they lie in the segments: the first pass over memory
    is then one that goes forward. Tied names stand next to each other.
    """
    names = manifest.names
    position = {name: number for number, name in enumerate(names)}
    rows = [
        (segment, offset, position[alias_of or name], alias_of is not None, number)
        for number, (name, (segment, offset, _, alias_of)) in enumerate(zip(names, manifest.geometries(), strict=True))
    ]
    return [(names[number], names[place]) for _, _, place, _, number in sorted(rows)]


def _extent(tensor: torch.Tensor) -> torch.Tensor:
    """All elements from the first to the last, gaps included: whatever the strides, its copy can be seen through them.

    A tensor without elements has none.
    """
    if not tensor.numel():
        return tensor.as_strided((0,), (1,))
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))


def _room(manifest: Manifest, like: torch.Tensor) -> torch.Tensor:
    """Bytes for the largest of all, on the device that ``like`` is on."""
    import torch

    largest = max(manifest.geometry(name).nbytes for name in manifest.names)
    return torch.empty(largest, dtype=torch.uint8, device=like.device)
