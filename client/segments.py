"""A mapped segment as one tensor of its bytes, whatever memory it is; every parameter is a view of that.

Owns the step from an address to torch. The tensor holds the mapping, which goes when the last view of it dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcached.protocol.errors import UnsupportedModel
from weightcached.protocol.memory import host
from weightcached.protocol.memory.kinds import SegmentMapping

if TYPE_CHECKING:
    import torch


def on_host(segment: SegmentMapping) -> host.Mapping:
    """The mapping, if the host's processors can use it where it is. UnsupportedModel for a device's memory."""
    if isinstance(segment, host.Mapping):
        return segment
    raise UnsupportedModel(
        "the weights are in a device's memory, which the host cannot address",
        expected="weights of memory kind host",
        next_step="use the tensors, or copy them: tensor.cpu()",
    )


def tensor_of(segment: SegmentMapping) -> torch.Tensor:
    """All bytes of the segment as one uint8 tensor, not copied."""
    import torch

    if not segment.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(on_host(segment).view(), dtype=torch.uint8)  # the view holds the mapping
