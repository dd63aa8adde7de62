"""Placement: where each parameter of a plan lies in the rank's one segment.

Pure. The order is the plan's, which the layout alone decides, so equal configs over equal headers give equal offsets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weightcached.loader.planned import LoadPlan, PlannedParameter
from weightcached.protocol.dtypes import itemsize_bytes

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Placed:
    """One parameter and its bytes ``offset .. offset + nbytes`` of the segment. Aliases share their target's place."""

    parameter: PlannedParameter
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Every parameter's place, in the plan's order, and the segment's size (a multiple of the alignment; may be 0)."""

    placed: tuple[Placed, ...]
    segment_nbytes: int


def place(plan: LoadPlan) -> Placement:
    """Lay the plan's parameters one after the other, each aligned to 256 bytes. Zero-size parameters take no room."""
    placed: dict[str, Placed] = {}
    end = 0
    for parameter in plan.parameters:
        if parameter.alias_of is not None:
            continue
        nbytes = math.prod(parameter.shape) * itemsize_bytes(parameter.dtype)
        placed[parameter.name] = Placed(parameter, end, nbytes)
        end = aligned(end + nbytes)
    for parameter in plan.parameters:
        if parameter.alias_of is not None:
            target = placed[parameter.alias_of]
            placed[parameter.name] = Placed(parameter, target.offset, target.nbytes)
    return Placement(tuple(placed[parameter.name] for parameter in plan.parameters), end)


def aligned(offset: int) -> int:
    """``offset``, rounded up to the alignment."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
