"""The lease book: which connections hold which generation. The connection is the lease; this only remembers for people.

Owns adding, removing and describing. Nothing is decided from it: memory is admitted by measuring, because an engine
that closed its lease may still map what it was granted. Used by the connection handlers, on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weightcached.protocol.messages import LeaseInfo
from weightcached.protocol.peers import Peer

SHOWN_MAX = 1000
_NAME_MAX_CHARACTERS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """One engine's hold on one generation. ``claimed_pid`` is what the engine calls itself in its own PID namespace."""

    peer: Peer
    claimed_pid: int
    name: str
    generation: str
    since_s: float


class LeaseBook:
    """Open leases, oldest first."""

    def __init__(self) -> None:
        self._leases: dict[Lease, None] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @contextmanager
    def held(self, *, peer: Peer, claimed_pid: int, name: str, generation: str) -> Iterator[Lease]:
        """A lease that is in the book while the block runs."""
        lease = Lease(peer, claimed_pid, name[:_NAME_MAX_CHARACTERS], generation, time.monotonic())
        self._leases[lease] = None
        try:
            yield lease
        finally:
            del self._leases[lease]

    def infos(self) -> tuple[LeaseInfo, ...]:
        """The oldest leases, at most as many as fit in a report. The pid is the kernel's, or the engine's own word when
        the kernel sees it in another PID namespace (0)."""
        now_s = time.monotonic()
        oldest = (lease for lease, _ in zip(self._leases, range(SHOWN_MAX), strict=False))
        return tuple(
            LeaseInfo(
                pid=lease.peer.pid or lease.claimed_pid,
                uid=lease.peer.uid,
                name=lease.name,
                age_s=round(now_s - lease.since_s, 3),
            )
            for lease in oldest
        )
