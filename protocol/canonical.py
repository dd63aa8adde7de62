"""One byte string for one JSON-like value, so that equal values always hash alike.

Owns the canonical encoding under fingerprints, versions and receipts. Pure: no I/O, no policy.

The encoding is JSON with sorted keys, no spaces, UTF-8, explicit nulls, and floats as ``{"$float": float.hex()}`` (a
decimal rendering could differ between writers). A key that itself starts with ``$`` gets one more ``$``, so no
document can imitate a tagged value. Integers and floats are different values: ``1`` is not ``1.0``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence


def canonical_bytes(value: object) -> bytes:
    """Encode ``value`` (None, bool, int, float, str, sequences, string-keyed mappings). TypeError for anything else."""
    return json.dumps(_tagged(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def canonical_sha256(value: object) -> str:
    """SHA-256 over :func:`canonical_bytes`, as 64 hex digits."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


def _tagged(value: object) -> object:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"$float": value.hex()}
    if isinstance(value, Mapping):
        return {_escaped_key(key): _tagged(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_tagged(item) for item in value]
    raise TypeError(f"no canonical form for {type(value).__name__}")


def _escaped_key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"mapping keys must be strings, found {key!r}")
    return "$" + key if key.startswith("$") else key
