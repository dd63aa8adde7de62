"""How much there may be of something, in all and for each user: connections, leases, bytes in flight.

Pure counting. Who is over a limit is told, or dropped, by whoever asked here; nobody waits for room, because a user who
holds what others wait for would decide how long. Something is kept back for root and the daemon's own user: whoever has
to find out what goes on, and to end it, must not be kept out by what goes on.
"""

from __future__ import annotations

import os
from collections import Counter


class Quota:
    """At most ``in_all``, and at most ``each`` for one user id. The last ``reserve`` are root's and our own user's."""

    def __init__(self, *, in_all: int, each: int, reserve: int = 0) -> None:
        self.in_all = in_all
        self.each = each
        self.reserve = reserve
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
        in_all = self.in_all - (0 if uid in (0, os.geteuid()) else self.reserve)
        if self._total + amount > in_all or self._used[uid] + amount > self.each:
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
