"""Words and numbers for people: safe on a terminal, short, aligned. Pure; used by logs and by the commands that
print.
"""

from __future__ import annotations

from weightcached.protocol.text import binary_size, one_line, table

__all__ = ["binary_size", "duration", "one_line", "table"]


def duration(seconds: float) -> str:
    """``5s``, ``12m``, ``3h``, ``8d``: the largest unit that fits, whole."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size_s:
            return f"{seconds // size_s:.0f}{unit}"
    return f"{seconds:.0f}s"
