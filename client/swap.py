"""Another generation in the place of the one in use: prepared aside, moved in while nobody computes.

Owns the two steps. :func:`stage` takes the descriptors of another generation over the lease, checks every claim and
every row, maps it and enters its pages: that takes its time, and nobody waits. :meth:`Staged.swap` exchanges what the
addresses show, within a barrier, and unmaps the old when readers go on. `WeightSet.stage` is where engines begin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weightcached.client.barrier import Stopped
from weightcached.client.comparison import NAMES_SHOWN, require_same_layout
from weightcached.client.transfer import Mapped, granted_manifest, map_granted
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import InvalidOption, SwapFailed, SwapRefused, WeightCacheError
from weightcached.protocol.integrity import differing_among
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory.giving_up import give_up
from weightcached.protocol.memory.kinds import SegmentMapping, kind_of
from weightcached.protocol.messages import Grant

if TYPE_CHECKING:
    from types import TracebackType

    from weightcached.client.weights import WeightSet

logger = logging.getLogger("weightcached.client")

Changed = Literal["refuse", "discard"]
"""What becomes of parameters that this process has written to, in pages of its own."""


@dataclass(kw_only=True)
class Swapped:
    """What :meth:`Staged.swap` did. What is marked so is known when the barrier has been left."""

    from_generation: str
    to_generation: str
    from_version: str
    to_version: str
    populate_s: float
    """For mapping the new generation and entering its pages, aside."""
    swap_s: float = 0.0
    """For the exchange itself, within the barrier."""
    changed: tuple[str, ...] = ()
    """Parameters of the old generation that this process had written to, and that it has lost. Complete when the
    barrier has been left; before that, those that were known when it was staged."""


class Staged:
    """Another generation, mapped aside. A context manager; it is given up where it was not swapped in."""

    def __init__(self, weights: WeightSet, grant: Grant, mapped: Mapped, *, changed: Sequence[str], seconds: float):
        """Takes ``mapped`` over. ``seconds`` it took; ``changed`` are the names that were found written to."""
        self.generation = grant.generation
        self.version = grant.version
        self.receipts_version = grant.receipts_version
        self.populate_s = seconds
        self.changed = tuple(changed)
        """Parameters in use that this process had written to when this was staged."""
        self._weights = weights
        self._grant = grant
        self._mapped: Mapped | None = mapped

    def swap(self, stopped: Stopped, *, changed: Changed = "refuse") -> Swapped:
        """Move this generation in: every tensor, view and address of the weight set shows it from now on.

        ``stopped`` is what `Barrier.stopped` of the weight set's barrier gave, and still holds: BarrierError without.
        With ``changed="refuse"`` parameters known to be written to by this process are a SwapRefused that names them;
        ``discard`` loses what was written. Looking for them goes through all pages, so it is done outside the barrier:
        when this is staged, and after it for what was written in between.

        SwapFailed where memory could not be moved: the weights in use are then what they were, unless it is not
        ``intact``. Then nobody gets past the barrier any more, and the process should end; so it is, too, where a
        signal's exception comes in between, which is raised. ValueError where this was used or given up, or the weight
        set was closed.
        """
        if changed not in ("refuse", "discard"):
            raise InvalidOption("unknown policy for changed parameters", expected="refuse or discard", found=changed)
        self._weights.barrier.require(stopped, "weights were to be exchanged")
        mapped = self._mapped
        if mapped is None:
            raise ValueError("this generation was swapped in or given up already: stage it again")
        if changed == "refuse" and self.changed:
            raise self._refusal()
        weights, began_s = self._weights, time.perf_counter()
        old, segments = weights.manifest, weights._open()
        for segment in segments:
            segment.settle()
        done = Swapped(
            from_generation=weights.generation,
            to_generation=self.generation,
            from_version=weights.version,
            to_version=self.version,
            populate_s=self.populate_s,
            changed=self.changed,
        )
        try:
            _exchange(segments, mapped.segments)
            done.swap_s = time.perf_counter() - began_s
            weights._now(mapped.manifest, self._grant)
            self._mapped = None
            stopped.afterwards(lambda: _retire(old, mapped.segments, done))
        except (WeightCacheError, ValueError) as error:
            if isinstance(error, SwapFailed) and not error.intact:
                stopped.for_ever(error)
            raise
        except BaseException as error:
            self._mapped = None  # some of it may be what is in use
            stopped.for_ever(_interrupted(error))
            raise
        return done

    def close(self) -> None:
        """Give it up: unmap it, and have the daemon know that the generation in use stays. Safe to call twice."""
        mapped, self._mapped = self._mapped, None
        if mapped is None:
            return
        mapped.close()
        if self._weights.lease is not None:
            self._weights.lease.keep_using()

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refusal(self) -> SwapRefused:
        more = f", and {len(self.changed) - NAMES_SHOWN} more" if len(self.changed) > NAMES_SHOWN else ""
        return SwapRefused(
            f"this process has written to {len(self.changed)} parameters, which it would lose",
            expected="weights as they were attached",
            found=", ".join(self.changed[:NAMES_SHOWN]) + more,
            next_step="revert() them and stage again, or swap with changed='discard'",
        )


def stage(weights: WeightSet, *, generation: str | None, version: str | None, timeout_s: float) -> Staged:
    """See `WeightSet.stage`."""
    lease = weights.lease
    if lease is None:
        raise InvalidOption("weights from disk have no other generations", expected="weights of a daemon", found="disk")
    segments = weights._open()
    config = CacheConfig.model_validate(weights.meta.config)
    if kind_of(config).dies_with_holder:
        raise SwapRefused(
            f"memory of kind {config.memory} has no other at its addresses",
            expected="weights of memory kind host or cuda-vmm",
            where=lease.where,
            next_step="start the engine again to change over to what is served now",
        )
    deadline = Deadline.after(timeout_s)
    changed = changed_names(weights.manifest, segments)
    grant, fds = lease.switch(generation=generation, version=version, timeout_s=deadline.remaining_s())
    began_s = time.perf_counter()
    try:
        with fds:
            manifest = granted_manifest(grant, fds, config=config, where=lease.where)
            require_same_layout(weights.manifest, manifest, where=lease.where)
            mapped = map_granted(manifest, grant, fds, config=config, where=lease.where)
        try:
            for segment in mapped.segments:
                segment.populate()
            return Staged(weights, grant, mapped, changed=changed, seconds=time.perf_counter() - began_s)
        except BaseException:
            give_up(mapped)
            raise
    except BaseException:
        lease.keep_using()
        raise


def changed_names(manifest: Manifest, segments: Sequence[SegmentMapping]) -> list[str]:
    """Names of parameters that this process has written to: they lie in pages of its own, and their bytes are not those
    of their digests. Goes through all pages, and reads parameters on such pages.
    """
    extents = [(number, start, stop) for number, segment in enumerate(segments) for start, stop in segment.written()]
    if not extents:
        return []
    touched = [
        row
        for row in manifest
        if row.alias_of is None
        and any(
            number == row.segment and start < row.offset + row.nbytes and row.offset < stop
            for number, start, stop in extents
        )
    ]
    return differing_among(touched, [segment.view() for segment in segments])


def _interrupted(error: BaseException) -> SwapFailed:
    """What is raised to readers once an exchange was left anywhere in the middle."""
    return SwapFailed(
        "weights were being exchanged when a signal came in between",
        expected="one generation in all segments",
        found=type(error).__name__,
        next_step="the weights in use may be half of each generation: end this process",
        intact=False,
    )


def _exchange(segments: Sequence[SegmentMapping], others: Sequence[SegmentMapping]) -> None:
    """All or none. SwapFailed that says so where some could not be taken back. What a signal raises leaves anything."""
    done: list[tuple[SegmentMapping, SegmentMapping]] = []
    try:
        for pair in zip(segments, others, strict=True):
            pair[0].exchange(pair[1])
            done.append(pair)
    except (WeightCacheError, ValueError) as failure:
        try:
            for segment, other in reversed(done):
                segment.exchange(other)
        except (WeightCacheError, ValueError) as error:
            raise SwapFailed(
                "some segments were exchanged and could not be taken back",
                expected="one generation in all segments",
                found=f"{failure}; then: {error}",
                next_step="the weights in use are not valid any more: end this process",
                intact=False,
            ) from error
        raise


def _retire(manifest: Manifest, segments: Sequence[SegmentMapping], done: Swapped) -> None:
    """What was in use before, now that readers have gone on: what this process had written there, and unmap it."""
    try:
        done.changed = tuple(changed_names(manifest, segments))
        if done.changed:
            logger.warning(
                "the swap to version %s has discarded what this process wrote to %d parameters: %s",
                done.to_version,
                len(done.changed),
                ", ".join(done.changed[:NAMES_SHOWN]),
            )
    finally:
        for segment in segments:
            segment.close()
