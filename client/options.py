"""What the options of an attach, and of changes to live weights, may be. Owns their checks; touches nothing. Called by
the functions that users call.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import numbers
import sys
from pathlib import Path

from weightcached.protocol.digest_cache import HEX
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.text import one_line, shown

LONGEST_TIMEOUT_S = 24 * 24 * 3600.0
"""About what poll() can wait, whose milliseconds have 32 bits."""
_SHORTEST_HEARTBEAT_S = 0.01
"""Less would be all that an engine's processor does."""
_LONGEST_HEARTBEAT_S = 24 * 3600.0
_WANT_MAX_CHARACTERS = 1024


def checked_want(want: str) -> str:
    """What a daemon can be asked for: text that fits a frame."""
    if not isinstance(want, str) or not 0 < len(want) <= _WANT_MAX_CHARACTERS or not want.isprintable():
        raise InvalidOption("unusable want", expected="'checkpoint', 'current', or a version", found=repr(want)[:200])
    return want


def checked_text(what: str, text: str) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidOption(f"unusable {what}", expected="text that is not empty", found=shown(text))
    return text


def checked_flags(**flags: bool) -> None:
    """Text such as ``"no"`` would mean yes."""
    for what, flag in flags.items():
        if not isinstance(flag, bool):
            raise InvalidOption(f"unusable {what}", expected="True or False", found=shown(flag))


def is_whole_number(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def checked_digest(digest: str | None, want: str) -> str | None:
    if digest is None:
        return None
    if want != "checkpoint":
        raise InvalidOption("a digest belongs to want='checkpoint'", found=f"want={want!r} and a digest")
    if not isinstance(digest, str) or not HEX.fullmatch(digest):
        expected = "64 hex digits: the first word that `weightcached digest` prints"
        raise InvalidOption("unusable digest", expected=expected, found=shown(digest))
    return digest


def checked_seconds(what: str, seconds: float) -> float:
    if not _is_number(seconds) or math.isnan(seconds) or seconds < 0:
        raise InvalidOption(f"unusable {what}", expected="seconds, 0 or more", found=shown(seconds))
    return min(seconds, LONGEST_TIMEOUT_S)


def checked_heartbeat(seconds: float) -> float:
    """A heartbeat cannot be left out: without one a daemon that hangs would never be noticed."""
    if not _is_number(seconds) or not _SHORTEST_HEARTBEAT_S <= seconds <= _LONGEST_HEARTBEAT_S:
        expected = f"at least {_SHORTEST_HEARTBEAT_S:g} seconds, at most a day"
        raise InvalidOption("unusable heartbeat_s", expected=expected, found=shown(seconds))
    return seconds


def _is_number(seconds: object) -> bool:
    return isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)


def engine_name(stated: str | None) -> str:
    """What this engine is called in the daemon's list of leases: as ``stated``, else after the program, whose file's
    name may be no text.
    """
    return one_line(str(stated or Path(sys.argv[0] if sys.argv else "").name or "python"))[:200]


@functools.cache
def client_version() -> str:
    return importlib.metadata.version("weightcached")
