"""A push to every rank of a group at once: whose boxes a tensor has, and one version of it all in the end.

Owns the threads: a few, one rank each at a time, because a rank whose buckets are full makes its thread wait. A tensor
is gone through by all ranks before the next, so that its owner may change or free it when :meth:`GroupPush.push`
returns. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from weightcached.client.publish.rank import RankPush
from weightcached.client.publish.values import Box, Given, Value, shape_of
from weightcached.protocol.assigned import assigned_version
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import PushMismatch
from weightcached.protocol.push_messages import WantedTensor
from weightcached.protocol.text import shown

THREADS_MAX = 4
_SMALL_NBYTES = 512 * 1024
"""Of a tensor that goes to all ranks by the calling thread: handing it over would cost more than copying it."""

_Result = TypeVar("_Result")


class GroupPush:
    """``ranks``: begun, the leader first; they belong to this from now on."""

    def __init__(self, ranks: Sequence[RankPush]) -> None:
        self._ranks = tuple(ranks)
        self._threads = ThreadPoolExecutor(min(len(self._ranks), THREADS_MAX), thread_name_prefix="weightcached-push")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors that some rank needs, in the order in which they lie in the checkpoint."""
        found = (tensor.name for rank in self._ranks for tensor in rank.table.values() if tensor.boxes)
        return tuple(dict.fromkeys(found))

    def boxes(self, name: str) -> dict[str, list[Box]]:
        """The device word of each rank's place → which parts of the tensor that rank needs. PushMismatch for a name
        that nobody knows.
        """
        self._wanted(name)
        return {rank.place.device: rank.boxes(name) for rank in self._ranks}

    def push(self, name: str, value: Value) -> None:
        """All of a tensor: every rank is sent what it needs of it."""
        wanted = self._wanted(name)
        self._push(wanted, value, tuple(slice(0, extent) for extent in wanted.shape))

    def push_box(self, name: str, box: Sequence[slice], value: Value) -> None:
        """A part of a tensor: every rank is sent what it needs of that."""
        wanted = self._wanted(name)
        self._push(wanted, value, _explicit(wanted, box))

    def _push(self, wanted: WantedTensor, value: Value, box: Box) -> None:
        parts = [(rank, _common(rank.boxes(wanted.name), box)) for rank in self._ranks]
        parts = [(rank, boxes) for rank, boxes in parts if boxes]
        if not parts:
            return
        given = Given(wanted, value, box)

        def push_to(rank: RankPush, boxes: list[Box]) -> None:
            for part in boxes:
                rank.push(wanted.name, given, part)

        if len(parts) == 1 or math.prod(shape_of(box)) * itemsize_bytes(wanted.dtype) <= _SMALL_NBYTES:
            for rank, boxes in parts:
                push_to(rank, boxes)
        else:
            self._all(push_to, parts)

    def finish(self) -> str:
        """Everything was pushed: wait until every rank has all of it, and give it one version, which is returned. Where
        nothing is new at any rank that is the one that is served: nothing comes of the push then.
        """
        self._all(RankPush.finish, ((rank,) for rank in self._ranks))
        filled = self._all(RankPush.filled, ((rank,) for rank in self._ranks))
        if all(one.unchanged for one in filled):
            self._all(RankPush.assign, ((rank, rank.staged.base_version) for rank in self._ranks))
            return self._ranks[0].staged.base_version
        resident = {rank.place.device: one.resident for rank, one in zip(self._ranks, filled, strict=True)}
        version = assigned_version(self._ranks[0].staged.base_version, resident)
        self._all(RankPush.assign, ((rank, version) for rank in self._ranks))
        return version

    def _all(self, work: Callable[..., _Result], arguments: Iterable[tuple[object, ...]]) -> list[_Result]:
        """Do it for each, side by side; the first failure, once nobody is at work any more."""
        futures = [self._threads.submit(work, *each) for each in arguments]
        failures = [failure for one in futures if (failure := one.exception()) is not None]
        if failures:
            raise failures[0]
        return [one.result() for one in futures]

    def _wanted(self, name: str) -> WantedTensor:
        for rank in self._ranks:
            if isinstance(name, str) and (wanted := rank.table.get(name)) is not None:
                return wanted
        raise PushMismatch(
            f"the checkpoint that is served has no tensor {shown(name)}",
            expected="a checkpoint's name, not an engine's",
            where=self._ranks[0].place.socket_path,
            next_step="push tensors under the names that they have in the checkpoint's files",
        )

    def close(self) -> None:
        """Give everything back; what is not finished is given up by the daemons. Safe to call twice."""
        self._threads.shutdown()
        for rank in self._ranks:
            rank.close()


def _explicit(wanted: WantedTensor, box: Sequence[slice]) -> Box:
    """``box`` with every axis, start and stop. Raises PushMismatch where it is none of the tensor's."""
    box = tuple(box) if isinstance(box, Iterable) else (box,)
    given = [*box, *(slice(None) for _ in wanted.shape[len(box) :])]
    if len(given) == len(wanted.shape) and all(map(_is_plain, given)):
        found = tuple(
            slice(0 if one.start is None else int(one.start), extent if one.stop is None else int(one.stop))
            for one, extent in zip(given, wanted.shape, strict=True)
        )
        if all(0 <= one.start <= one.stop <= extent for one, extent in zip(found, wanted.shape, strict=True)):
            return found
    raise PushMismatch(
        f"no box of {shown(wanted.name)}",
        expected=f"slices within {list(wanted.shape)}, without steps",
        found=", ".join(map(str, box)),
    )


def _is_plain(one: object) -> bool:
    """Whether it is a slice from and to a whole number, where it says so, with nothing left out between."""
    ends = (one.start, one.stop) if isinstance(one, slice) and one.step in (None, 1) else ("",)
    return all(end is None or hasattr(end, "__index__") for end in ends)


def _common(needed: Iterable[Box], box: Box) -> list[Box]:
    """What of ``box`` is needed."""
    found = []
    for one in needed:
        part = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, box, strict=True))
        if all(each.start < each.stop for each in part):
            found.append(part)
    return found
