"""Versions of weights that nobody can find in a checkpoint's files: those that a trainer pushed.

Pure. Such a version is *assigned*: made once, by the trainer, from the version before and from what every rank holds
afterwards, and told to all of them. So equal weights pushed onto equal weights have equal versions, whatever the order
and the pieces in which they came, and a version stands for one state of the whole group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from weightcached.protocol.canonical import canonical_sha256
from weightcached.protocol.manifest import Row

ASSIGNED_PREFIX = "pushed:"


def assigned_version(previous: str, resident: Mapping[str, str]) -> str:
    """``pushed:<hex>``. ``resident``: each rank's device word → what :func:`resident_digest` says of it."""
    return f"{ASSIGNED_PREFIX}{canonical_sha256({'version': 1, 'previous': previous, 'ranks': dict(resident)})}"


def is_assigned(version: str) -> bool:
    """Whether no digest of files stands behind this version."""
    return version.startswith(ASSIGNED_PREFIX)


def resident_digest(rows: Iterable[Row]) -> str:
    """SHA-256, as hex, of what lies under which name in which form. Not of where: the layout alone decides that."""
    hasher = hashlib.sha256()
    for row in sorted(rows, key=lambda row: row.name):
        form = (row.name, row.dtype, ",".join(map(str, row.shape)), row.alias_of or "")
        for text in form:
            encoded = text.encode()
            hasher.update(len(encoded).to_bytes(4, "little") + encoded)
        hasher.update(row.digest)
    return hasher.hexdigest()
