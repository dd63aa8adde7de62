"""What an adapter has returned, checked to be what the interface says: a `Built`, its names, its scalars.

Pure, and without torch: whether a tensor can be shared is `state.py`'s to say. An adapter is somebody else's code, and
what it gives wrongly is told as its own, by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from weightcached.protocol.engines import Built, NamedTensor
from weightcached.protocol.errors import EngineFailed, UnsupportedModel
from weightcached.protocol.manifest import Kind
from weightcached.protocol.text import one_line, shown

_KINDS = get_args(Kind)


def require_built(returned: Any, *, what: str) -> Built:
    """``returned`` if it is a `Built` with parts of the right kinds; ``what`` returned it. Raises EngineFailed."""
    fill = getattr(returned, "fill", None)
    parts = {
        "a Built": isinstance(returned, Built),
        "tensors as a sequence": isinstance(getattr(returned, "tensors", None), Sequence),
        "scalars as a mapping": isinstance(getattr(returned, "scalars", None), Mapping),
        "fill as a function, or None": fill is None or callable(fill),
    }
    for expected, is_so in parts.items():
        if not is_so:
            raise EngineFailed(
                f"{what} returned something else than the interface says",
                expected=f"{expected} (weightcached.protocol.engines)",
                found=type(returned).__name__ if expected == "a Built" else shown(returned),
            )
    return returned  # type: ignore[no-any-return]


def require_named(named: Any) -> NamedTensor:
    """``named`` if a row can have its name and kind. Raises UnsupportedModel."""
    if not isinstance(named, NamedTensor):
        raise refused("of one place in tensors", "a NamedTensor", type(named).__name__)
    _require_text(named.name, what="tensor")
    if named.kind not in _KINDS or not isinstance(named.persistent, bool):
        found = f"kind {shown(named.kind)}, persistent {shown(named.persistent)}"
        raise refused(named.name, f"a kind of {', '.join(_KINDS)}, and persistent as True or False", found)
    return named


def require_scalars(scalars: Mapping[Any, Any]) -> None:
    """Raises UnsupportedModel naming a scalar that a manifest cannot hold."""
    for name, scalar in scalars.items():
        _require_text(name, what="scalar")
        usable = scalar is None or isinstance(scalar, bool)
        usable = usable or (isinstance(scalar, int) and -(2**63) <= scalar < 2**63)
        usable = usable or (isinstance(scalar, float) and math.isfinite(scalar))
        usable = usable or (isinstance(scalar, str) and _is_encodable(scalar))
        if not usable:
            expected = "a flag, an integer of 64 bits, a finite number, a word in UTF-8 or None"
            raise refused(name, expected, f"{type(scalar).__name__} {shown(scalar)}", what="scalar")


def refused(name: object, expected: str, found: str, *, what: str = "tensor") -> UnsupportedModel:
    """The error for a part of an engine's state that no manifest can describe."""
    return UnsupportedModel(
        f"the engine's {what} {one_line(str(name))} cannot be shared",
        expected=expected,
        found=found,
        next_step="let the engine's adapter give another form of it, or configure the engine without it",
    )


def _require_text(name: object, *, what: str) -> None:
    if not isinstance(name, str) or not name or not _is_encodable(name):
        raise refused(shown(name), "a name that is text in UTF-8 and not empty", type(name).__name__, what=what)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
