"""Tensors and their places: a tensor over a place of a mapped segment, copying to it, and moving there; or the bytes
that a place is to have, for memory that the host cannot address (`onto_device.py`).

Knows torch; owns no memory. What is moved is of no use once the segment is unmapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcached.loader.engines.state import PlacedState, PlacedTensor

if TYPE_CHECKING:
    import torch


def place_of(one: PlacedTensor, segment: memoryview) -> torch.Tensor:
    """The place as a tensor of its form. Of a tensor without elements there is no place."""
    import torch

    here = torch.frombuffer(segment[one.offset : one.offset + one.nbytes], dtype=one.tensor.dtype)
    return here.as_strided(one.tensor.shape, one.tensor.stride())


def copy_to(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy ``tensor`` to ``place``, unless it lies there already."""
    import torch

    source = tensor.detach()
    if source.data_ptr() == place.data_ptr():
        return
    with torch.no_grad():
        for axis, step in enumerate(source.stride()):
            if step == 0:  # an expanded axis: all its elements are one
                source, place = source.narrow(axis, 0, 1), place.narrow(axis, 0, 1)
        place.copy_(source)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether its elements are in a GPU's memory, for the driver to copy."""
    return bool(tensor.is_cuda)


def dense(one: PlacedTensor) -> torch.Tensor:
    """The bytes of the tensor's place, in one piece and on the tensor's own device: the tensor itself, or a copy where
    it has gaps, with zeros there. Not empty.
    """
    import torch

    source = one.tensor.detach()
    if source.numel() * source.itemsize == one.nbytes:
        whole: torch.Tensor = source.as_strided((source.numel(),), (1,))
        return whole.view(torch.uint8)
    copy = torch.zeros(one.nbytes // source.itemsize, dtype=source.dtype, device=source.device)
    copy_to(copy.as_strided(source.shape, source.stride()), source)
    return copy.view(torch.uint8)


def move(state: PlacedState, segment: memoryview) -> None:
    """Have every tensor of ``state``, each staying the object that it is, lie at its place, with what it holds.

    Memory that nobody has written to yet costs no more than being read as zeros.
    """
    for one in state.placed:
        if one.nbytes:
            place = place_of(one, segment)
            if one.alias_of is None:
                copy_to(place, one.tensor)
            one.tensor.data = place
