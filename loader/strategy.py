"""Strategy: how bytes get from the checkpoint's files into a segment, and why that way.

Pure choice; `reading.py` carries it out. There is one way so far. Others (direct I/O, prefetch into huge pages) belong
here, as rules over the file system, free memory and the access pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weightcached.protocol.errors import InvalidOption

StrategyName = Literal["read"]
STRATEGIES: tuple[StrategyName, ...] = ("read",)


@dataclass(frozen=True, slots=True)
class Strategy:
    """The way chosen and the reason, for the log."""

    name: StrategyName
    reason: str


def choose(asked: str = "auto") -> Strategy:
    """The strategy for ``asked``: one of :data:`STRATEGIES`, or ``auto``. Raises InvalidOption."""
    if asked == "auto":
        return Strategy(
            "read",
            "memory is the host's: taking fresh pages costs more than reading, and writing whole pages from a small "
            "buffer takes them without zeroing or mapping them first",
        )
    for name in STRATEGIES:
        if asked == name:
            return Strategy(name, "asked for")
    raise InvalidOption("unknown strategy", expected=", ".join(("auto", *STRATEGIES)), found=asked)
