"""How much there may be of something, in all and for each user: connections, leases, bytes in flight.

Pure counting. Who is over a limit is told, or dropped, by whoever asked here; nobody waits for room, because a user who
holds what others wait for would decide how long.
"""

from __future__ import annotations

from collections import Counter


class Quota:
    """At most ``in_all``, and at most ``each`` for one user id."""

    def __init__(self, *, in_all: int, each: int) -> None:
        self.in_all = in_all
        self.each = each
        self._used: Counter[int] = Counter()
        self._total = 0

    @property
    def used(self) -> int:
        """By everybody together."""
        return self._total

    def used_by(self, uid: int) -> int:
        return self._used[uid]

    def take(self, uid: int, amount: int = 1) -> bool:
        """Count ``amount`` more for ``uid``, if both limits allow it; whether they do."""
        if self._total + amount > self.in_all or self._used[uid] + amount > self.each:
            return False
        self._total += amount
        self._used[uid] += amount
        return True

    def give(self, uid: int, amount: int = 1) -> None:
        """Give back what was taken."""
        self._total -= amount
        self._used[uid] -= amount
        if not self._used[uid]:
            del self._used[uid]
