"""Buckets: the memory through which a trainer pushes. Made here, so that whoever maps it knows that it stays.

Owns how they are made: memfds sealed against shrinking and growing (memory that becomes shorter kills who touches it)
and not against writing, since they are written again and again. The trainer is given a descriptor that can be written,
the worker one that cannot.
"""

from __future__ import annotations

import fcntl

from weightcached.protocol.memory import host

MEMFD_NAME = "weightcached:bucket"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_bucket(nbytes: int) -> int:
    """A new one; the caller owns the descriptor. Raises InsufficientMemory."""
    fd = host.allocate(nbytes, name=MEMFD_NAME)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
