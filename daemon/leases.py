"""The lease book: which connections hold which generation. The connection is the lease; this only remembers for people.

Owns adding, removing and describing. Nothing is decided from it: memory is admitted by measuring, because an engine
that closed its lease may still map what it was granted. Used by the connection handlers, on the event loop.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weightcached.protocol.messages import LeaseInfo
from weightcached.protocol.peers import Peer

SHOWN_MAX = 1000
DETACHED_AFTER_S = 15.0
"""An engine gives a sign of life every five seconds: one that has missed three is stopped, or hangs."""
COUNT_MAX = (1 << 63) - 1
"""Of what a message can carry."""
_PROCESSES_MAX = 4096
_NAME_MAX_CHARACTERS = 64


@dataclass(slots=True, eq=False)
class Lease:
    """One engine's hold on one generation. ``claimed_pid`` is what the engine calls itself in its own PID namespace."""

    peer: Peer
    claimed_pid: int
    name: str
    generation: str
    since_s: float
    heard_s: float
    """When the engine last said anything."""

    def heard(self) -> None:
        """It said something just now."""
        self.heard_s = time.monotonic()


class LeaseBook:
    """Open leases, oldest first."""

    def __init__(self) -> None:
        self._leases: dict[Lease, None] = {}
        self.on_end: Callable[[], None] | None = None
        """Hears that some generation may be leased by one fewer."""

    def __len__(self) -> int:
        return len(self._leases)

    @contextmanager
    def held(self, *, peer: Peer, claimed_pid: int, name: str, generation: str) -> Iterator[Lease]:
        """A lease that is in the book while the block runs."""
        now_s = time.monotonic()
        lease = Lease(peer, claimed_pid, name[:_NAME_MAX_CHARACTERS], generation, now_s, now_s)
        self._leases[lease] = None
        try:
            yield lease
        finally:
            del self._leases[lease]
            self._ended()

    def move(self, lease: Lease, generation: str) -> None:
        """The engine holds another generation from now on."""
        lease.generation = generation
        self._ended()

    def _ended(self) -> None:
        if self.on_end is not None:
            self.on_end()

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
                silent_s=round(now_s - lease.heard_s, 3),
            )
            for lease in oldest
        )

    def silence_s(self) -> float:
        """For how long the most silent engine has said nothing; 0 without any."""
        now_s = time.monotonic()
        return max((now_s - lease.heard_s for lease in self._leases), default=0.0)

    def detached(self) -> int:
        """How many engines have said nothing for so long that they cannot be well."""
        heard_s = time.monotonic() - DETACHED_AFTER_S
        return sum(lease.heard_s < heard_s for lease in self._leases)

    def generations(self) -> set[str]:
        """Those that are leased."""
        return {lease.generation for lease in self._leases}

    def counts(self) -> Counter[str]:
        """How many leases each generation has."""
        return Counter(lease.generation for lease in self._leases)


class FallbackCount:
    """How often engines loaded from disk because they found no daemon, from what each process says of itself.

    A process says how often *it* did, each time it asks for anything, so only what is new about it counts.
    """

    def __init__(self) -> None:
        self.total = 0
        self._known: OrderedDict[tuple[int, int, str], int] = OrderedDict()

    def hear(self, peer: Peer, name: str, count: int) -> None:
        """``count`` is the process's own, since it began. The least recently heard processes are forgotten."""
        process = (peer.pid, peer.uid, name[:_NAME_MAX_CHARACTERS])
        known = self._known.pop(process, 0)
        new = count - known if count >= known else count  # fewer: another process, with the pid of one gone
        self.total = min(self.total + new, COUNT_MAX)  # a count that lies must not make one that no report can carry
        self._known[process] = count
        while len(self._known) > _PROCESSES_MAX:
            self._known.popitem(last=False)
