"""Words and numbers for people: safe on a terminal, short, aligned. Pure; used by logs and by the commands that
print.
"""

from __future__ import annotations

from weightcached.protocol.text import binary_size, duration, one_line, table

__all__ = ["binary_size", "duration", "one_line", "table"]
