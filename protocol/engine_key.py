"""What an engine that makes its own layout adds to the config: its name, its adapter's revision, and its key's entries.

Pure. The entries are the adapter's to say (`engines.py`); here they are only checked to be what a config can hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from weightcached.protocol.canonical import canonical_bytes
from weightcached.protocol.errors import EngineFailed
from weightcached.protocol.frozen import freeze, thaw
from weightcached.protocol.text import shown

ENTRIES_MAX = 64
NAME_MAX_CHARACTERS = 100
KEY_MAX_BYTES = 32 * 1024
"""In its canonical encoding; half of what a client's frame holds."""


@dataclass(frozen=True)
class EngineKey:
    """Made by :meth:`of`, on both sides from the same inputs."""

    name: str
    """The engine's, and the layout's."""
    revision: int
    """The adapter's, and the layout's."""
    entries: Mapping[str, Any]
    """All that changes a byte or a shape of the engine's state, besides what a config holds for every layout."""

    @classmethod
    def of(cls, name: str, revision: int, entries: Mapping[str, Any]) -> EngineKey:
        """Checked and frozen. Raises EngineFailed for entries that no config can hold: they are the adapter's fault."""
        try:
            plain = thaw(freeze(entries))
            for entry, value in plain.items():
                _require_finite(value, entry)
            nbytes = len(canonical_bytes(plain))
            msgpack.packb(plain)
            found = f"{nbytes} bytes, {len(plain)} names: {shown(list(plain)[:8])}"
            usable = 0 < len(plain) <= ENTRIES_MAX and nbytes <= KEY_MAX_BYTES
            usable = usable and all(0 < len(name) <= NAME_MAX_CHARACTERS for name in plain)
        except (TypeError, ValueError, OverflowError) as error:
            usable, found = False, f"{type(error).__name__}: {error}"
        if not usable:
            raise EngineFailed(
                f"the key of engine {name} cannot be used",
                expected=f"1 to {ENTRIES_MAX} names with finite JSON values, at most {KEY_MAX_BYTES} bytes in all",
                found=found[:500],
            )
        return cls(name, revision, freeze(entries))


def _require_finite(value: Any, entry: object) -> None:
    """JSON has no such number, and one that is not a number differs from itself. ValueError names the entry."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{shown(entry)} holds {value}")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_finite(item, entry)
