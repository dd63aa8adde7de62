"""Placement: which segment each parameter of a plan lies in, and where there.

Pure. The order is the plan's, which the layout alone decides, and the memory kind says how large a segment may be: so
equal configs over equal headers, in memory of one kind, give equal places. Where the kind has no such limit there is
one segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weightcached.loader.planned import LoadPlan, PlannedParameter
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import UnsupportedModel
from weightcached.protocol.messages import GRANT_SEGMENTS_MAX

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Placed:
    """One parameter and its bytes ``offset .. offset + nbytes`` of a segment. Aliases share their target's place."""

    parameter: PlannedParameter
    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Every parameter's place, in the plan's order, and each segment's size (a multiple of the alignment; one may be
    0, if it is the only one).
    """

    placed: tuple[Placed, ...]
    segments_nbytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all segments together."""
        return sum(self.segments_nbytes)

    @property
    def transforms(self) -> bool:
        """Whether any parameter is not what the files have."""
        return any(placed.parameter.transform is not None for placed in self.placed)


class Places:
    """Hands out places one after the other, and begins another segment where the next does not fit into this one."""

    def __init__(self, segment_max_nbytes: int | None = None) -> None:
        """``segment_max_nbytes``: what a segment of the memory kind may be at most; None: as much as it takes."""
        self._most = None if segment_max_nbytes is None else segment_max_nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._ends = [0]

    def take(self, name: str, nbytes: int) -> tuple[int, int]:
        """(segment, offset) of so many bytes, in one piece. What has no bytes takes no room.

        Raises UnsupportedModel where no segment may be that large, or more are needed than a grant carries.
        """
        offset = self._ends[-1]
        end = offset + -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._most is not None and end > self._most:
            if end - offset > self._most:
                raise UnsupportedModel(
                    f"{name} is larger than a segment of this memory kind may be",
                    expected=f"at most {self._most} bytes: a parameter is never parted",
                    found=f"{nbytes} bytes",
                    next_step="use more TP ranks, or another memory kind (--memory)",
                )
            if len(self._ends) == GRANT_SEGMENTS_MAX:
                raise UnsupportedModel(
                    "the shard takes more segments than an engine can be granted",
                    expected=f"at most {GRANT_SEGMENTS_MAX} of at most {self._most} bytes",
                    found=f"no room for {name} in the last of them",
                    next_step="use more TP ranks, or another memory kind (--memory)",
                )
            self._ends.append(end - offset)
            return len(self._ends) - 1, 0
        self._ends[-1] = end
        return len(self._ends) - 1, offset

    @property
    def segments_nbytes(self) -> tuple[int, ...]:
        """What has been handed out so far."""
        return tuple(self._ends)


def place(plan: LoadPlan, segment_max_nbytes: int | None = None) -> Placement:
    """Lay the plan's parameters one after the other, each aligned to 256 bytes, each in one segment.

    Raises UnsupportedModel as :meth:`Places.take`.
    """
    places = Places(segment_max_nbytes)
    placed: dict[str, Placed] = {}
    for parameter in plan.parameters:
        if parameter.alias_of is not None:
            continue
        nbytes = math.prod(parameter.shape) * itemsize_bytes(parameter.dtype)
        placed[parameter.name] = Placed(parameter, *places.take(parameter.name, nbytes), nbytes)
    for parameter in plan.parameters:
        if parameter.alias_of is not None:
            target = placed[parameter.alias_of]
            placed[parameter.name] = Placed(parameter, target.segment, target.offset, target.nbytes)
    return Placement(tuple(placed[parameter.name] for parameter in plan.parameters), places.segments_nbytes)


def aligned(offset: int) -> int:
    """``offset``, rounded up to the alignment."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
