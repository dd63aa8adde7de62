"""What the memfds of a generation are called: the name travels with a descriptor and cannot be changed.

Owns the two forms and reading them back. The keeper allocates segments, the worker the manifest; a restarted keeper
recognises both by these names, whatever a vault calls them.
"""

from __future__ import annotations

import os
import re

_PART = re.compile(r"weightcached:([0-9a-f]{32}):(manifest|\d{1,4})", re.ASCII)
_LINK = re.compile(r"/memfd:(.*?)(?: \(deleted\))?", re.DOTALL)


def segment_name(generation: str, number: int) -> str:
    """For a segment, counted from 0."""
    return f"weightcached:{generation}:{number}"


def manifest_name(generation: str) -> str:
    """For the manifest."""
    return f"weightcached:{generation}:manifest"


def name_of(fd: int) -> str | None:
    """What the memfd was called when it was made; ``None`` for what is no memfd."""
    found = _LINK.fullmatch(os.readlink(f"/proc/self/fd/{fd}"))
    return found[1] if found else None


def part_of(name: str) -> tuple[str, int | None] | None:
    """The generation and the number of the segment (``None``: the manifest); ``None`` for any other name."""
    found = _PART.fullmatch(name)
    if found is None:
        return None
    return found[1], None if found[2] == "manifest" else int(found[2])
