"""Counters of the client, for the engine's own metrics endpoint. Imported only where there is something to count.

They live in prometheus_client's default registry, so an engine that serves ``/metrics`` serves them too.
"""

from __future__ import annotations

from prometheus_client import Counter

FALLBACKS = Counter(
    "weightcached_client_disk_fallbacks",
    "Attaches that found no daemon's socket and loaded the weights from disk instead",
    ["place"],
)


def count_fallback(place: str) -> None:
    """One more fallback at ``place`` (name and device, such as ``default/host-tp0of1``)."""
    FALLBACKS.labels(place=place).inc()
