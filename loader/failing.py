"""What a worker says of a failure: the error's fields, and whether another attempt may end better. Pure."""

from __future__ import annotations

import errno

from weightcached.protocol.errors import CheckpointChanged, InsufficientMemory, InternalError, WeightCacheError
from weightcached.protocol.messages import shortened
from weightcached.protocol.worker_messages import Failed

# What another attempt may not meet again: a network file system's bad moment, memory that somebody else gives back.
_TRANSIENT_ERRNOS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EMFILE}
)


def report(failure: Exception) -> Failed:
    """``Failed`` for what happened. Bad files and bad configs are permanent; memory and I/O may be better next time."""
    error = _as_weightcache_error(failure)
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else failure
    transient = isinstance(error, CheckpointChanged | InsufficientMemory) or (
        isinstance(cause, OSError) and cause.errno in _TRANSIENT_ERRNOS
    )
    fields = {name: shortened(text) for name, text in error.as_fields().items() if text is not None}
    return Failed.model_validate({**fields, "transient": transient})


def _as_weightcache_error(failure: Exception) -> WeightCacheError:
    if isinstance(failure, WeightCacheError):
        return failure
    if isinstance(failure, MemoryError) or (
        isinstance(failure, OSError) and failure.errno in (errno.ENOMEM, errno.ENOSPC)
    ):
        return InsufficientMemory(
            "the worker has no memory for its own work",
            found=str(failure) or type(failure).__name__,
            next_step="free memory on this host, or raise the worker's limits (control group, ulimit -v)",
        )
    return InternalError(
        "the worker failed in a way nobody foresaw",
        found=f"{type(failure).__name__}: {failure}",
        next_step="report this, with the daemon's log",
    )
