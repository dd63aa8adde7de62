"""What the options of an attach may be. Owns their checks; touches nothing. Called by ``attach.py``."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import sys
from pathlib import Path

from weightcached.protocol.digest_cache import HEX
from weightcached.protocol.errors import InvalidOption

_LONGEST_TIMEOUT_S = 365 * 24 * 3600.0
_LONGEST_HEARTBEAT_S = 24 * 3600.0


def checked_digest(digest: str | None, want: str) -> str | None:
    if digest is None:
        return None
    if want != "checkpoint":
        raise InvalidOption("a digest belongs to want='checkpoint'", found=f"want={want!r} and a digest")
    if not HEX.fullmatch(digest):
        raise InvalidOption("unusable digest", expected="64 hex digits, as `weightcached digest` prints", found=digest)
    return digest


def checked_seconds(what: str, seconds: float) -> float:
    if math.isnan(seconds) or seconds < 0:
        raise InvalidOption(f"unusable {what}", expected="seconds, 0 or more", found=seconds)
    return min(seconds, _LONGEST_TIMEOUT_S)


def checked_heartbeat(seconds: float) -> float:
    """A heartbeat cannot be left out: without one a daemon that hangs would never be noticed."""
    if not 0 < seconds <= _LONGEST_HEARTBEAT_S:
        raise InvalidOption("unusable heartbeat_s", expected="more than 0 seconds, at most a day", found=seconds)
    return seconds


def engine_name(stated: str | None) -> str:
    """What this engine is called in the daemon's list of leases: as ``stated``, else after the program."""
    return (stated or Path(sys.argv[0] if sys.argv else "").name or "python")[:200]


@functools.cache
def client_version() -> str:
    return importlib.metadata.version("weightcached")
