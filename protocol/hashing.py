"""Owns one function: BLAKE3 over the bytes of open weight files, by reading them once.

Called by :mod:`weightcached.protocol.digests`, which knows when it has to be called at all.

The digest is BLAKE3 in derive-key mode, context ``weightcached checkpoint content, version 1``, over, for each name in
sorted order::

    u32le(bytes of the name) ‖ name in UTF-8 ‖ u64le(bytes of the file) ‖ BLAKE3(the file's bytes)

where the index is one of the files.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping

from blake3 import blake3

from weightcached.protocol.errors import CheckpointError

_CONTEXT = "weightcached checkpoint content, version 1"
_PIECE_BYTES = 4 << 20  # large enough for BLAKE3's threads, small enough to stay in the processor's cache

Progress = Callable[[int], None]
"""Told the bytes hashed so far after each piece (4 MiB)."""


def content_digest(weights: Mapping[str, int], *, progress: Progress | None = None) -> str:
    """The digest (64 hex digits) of open files, read whole through their descriptors; uses every core.

    ``weights`` maps names to descriptors, as :class:`~weightcached.protocol.content.OpenWeights` does. File offsets are
    left alone. Files are read, not mapped: one that shrinks meanwhile must not kill the reader. Whether they changed is
    for the caller to find out, by receipts before and after. Raises :class:`CheckpointError` when a read fails.
    """
    combined = blake3(derive_key_context=_CONTEXT)
    buffer = memoryview(bytearray(_PIECE_BYTES))
    done = 0
    for name in sorted(weights):
        hasher = blake3(max_threads=blake3.AUTO)
        offset = 0
        while count := _read(weights[name], buffer, offset, name):
            hasher.update(buffer[:count])
            offset += count
            if progress is not None:
                progress(done + offset)
        done += offset
        encoded = os.fsencode(name)
        combined.update(struct.pack("<I", len(encoded)) + encoded + struct.pack("<Q", offset) + hasher.digest())
    return combined.hexdigest()


def _read(fd: int, buffer: memoryview, offset: int, name: str) -> int:
    try:
        return os.preadv(fd, [buffer], offset)
    except OSError as error:
        raise CheckpointError(
            "a file of the checkpoint cannot be read", found=error.strerror, where=f"{name}, byte {offset}"
        ) from error
