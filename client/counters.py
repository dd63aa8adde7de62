"""Counters of the client: for the engine's own metrics endpoint, and for the daemon, which hears of a fallback only
from the engine that fell back.

They live in prometheus_client's default registry, so an engine that serves ``/metrics`` serves them too. Its import is
paid for by who has something to count.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter

_fallbacks: list[str] = []
# A forked child has loaded nothing yet: what its parent counted is told to daemons by its parent.
os.register_at_fork(after_in_child=_fallbacks.clear)


def count_fallback(place: str) -> None:
    """One more fallback at ``place`` (name and device, such as ``default/host-tp0of1``)."""
    _fallbacks.append(place)
    _exported().labels(place=place).inc()


def fallbacks() -> int:
    """How often this process has loaded from disk because it found no daemon."""
    return len(_fallbacks)


@functools.cache
def _exported() -> Counter:
    from prometheus_client import Counter

    return Counter(
        "weightcached_client_disk_fallbacks",
        "Attaches that found no daemon's socket and loaded the weights from disk instead",
        ["place"],
    )
