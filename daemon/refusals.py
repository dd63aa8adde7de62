"""How an error becomes a ``Refused`` frame (the way back is ``errors.error_from``), and one of ours one of the tree.

Pure. Keeps every text within the limits of a frame, so that an answer about an error cannot itself fail.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

import msgpack

from weightcached.protocol.config import CacheConfig, abbreviated, differing_entries
from weightcached.protocol.errors import (
    CacheConfigMismatch,
    DaemonNotReady,
    InternalError,
    ProtocolError,
    WeightCacheError,
)
from weightcached.protocol.messages import DifferingField, Hello, Refused, shortened

VALUES_MAX_BYTES = 512 * 1024
_NAME_MAX_CHARACTERS = 1024


def refusal(error: WeightCacheError) -> Refused:
    """The frame that says what ``error`` says."""
    fields = {key: shortened(value) for key, value in error.as_fields().items() if value is not None}
    return Refused.model_validate(fields)


def unexpected(error: Exception) -> WeightCacheError:
    """The error that stands for one of ours, which nobody foresaw and whose traceback is in the log; or for the limit
    on open files, which may be met anywhere.
    """
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return DaemonNotReady(
            "the daemon has no descriptor left",
            found=error.strerror,
            next_step="wait for other engines to attach, or raise the daemon's limit on open files",
        )
    return InternalError(
        "the daemon met an error it did not expect",
        found=f"{type(error).__name__}: {error}",
        next_step="see the daemon's log for the traceback, and report it",
    )


def mismatch(config: CacheConfig, hello: Hello) -> Refused | None:
    """The refusal of a Hello whose config differs from ours, with our value of every differing entry; ``None`` if none.

    Values are sent in full, to explain, until they would fill the frame; from there on as their digest. Raises
    ProtocolError when the fingerprints differ and the entries do not: the client's own two accounts disagree.
    """
    if hello.fingerprint == config.fingerprint:
        return None
    ours = config.entries()
    names = differing_entries(ours, hello.config)
    if not names:
        raise ProtocolError(
            "the fingerprint is not that of the config beside it",
            expected=config.fingerprint,
            found=hello.fingerprint,
            next_step="install the same weightcached release on both sides",
        )
    return Refused(
        code=CacheConfigMismatch.code,
        message="the daemon caches another configuration",
        found=shortened(", ".join(names)),
        fields=tuple(_differing(ours, names)),
    )


def _differing(ours: Mapping[str, Any], names: list[str]) -> list[DifferingField]:
    short = abbreviated(ours)
    left = VALUES_MAX_BYTES
    fields = []
    for name in names:
        value = ours.get(name)
        size = len(name) + len(msgpack.packb(value))
        if size > left:
            value = short.get(name)
            size = len(name) + len(msgpack.packb(value))
        left -= size
        if left < 0:
            break
        fields.append(DifferingField(name=name[:_NAME_MAX_CHARACTERS], present=name in ours, value=value))
    return fields
