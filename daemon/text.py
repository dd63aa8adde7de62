"""Words and numbers for people: safe on a terminal, short, aligned. Pure; used by logs and by the commands that
print.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightcached.protocol.text import one_line

__all__ = ["binary_size", "duration", "one_line", "table"]


def binary_size(nbytes: float) -> str:
    """``0 B``, ``12.3 MiB``: three digits or so, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(seconds: float) -> str:
    """``5s``, ``12m``, ``3h``, ``8d``: the largest unit that fits, whole."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size_s:
            return f"{seconds // size_s:.0f}{unit}"
    return f"{seconds:.0f}s"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
