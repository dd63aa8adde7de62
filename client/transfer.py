"""From the descriptors of a grant to mapped memory, every claim about them checked first.

Owns the checks (count, seals, exact sizes, the manifest's digest, and that grant and manifest say the same) and
mapping. Called by ``attach.py`` and ``swap.py``. Does not talk to the daemon.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from weightcached.client.holder import HolderWatch, OnHolderLost, require_alive, require_process
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import TransferError, WeightCacheError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import MANIFEST_MAX_BYTES, Manifest
from weightcached.protocol.memory import host
from weightcached.protocol.memory.giving_up import give_up
from weightcached.protocol.memory.kinds import MemoryKind, SegmentMapping, kind_of
from weightcached.protocol.messages import Grant

if TYPE_CHECKING:
    from weightcached.protocol.memory.cuda_ipc import IpcMapping


@dataclass(frozen=True)
class Mapped:
    """A generation in this process: its manifest, and each segment mapped. No descriptor is left of it, but for what
    tells of a holder's end.
    """

    manifest: Manifest
    segments: tuple[SegmentMapping, ...]

    def close(self) -> None:
        """Unmap now, each whatever the driver says to others. Only where no tensor was made yet."""
        with ExitStack() as each:
            for segment in self.segments:
                each.callback(segment.close)


def import_grant(
    grant: Grant, fds: OwnedFds, *, config: CacheConfig, where: str, on_holder_lost: OnHolderLost = "exit"
) -> Mapped:
    """Map what ``grant`` announces. ``fds`` are all closed afterwards; the caller owns the mappings. Where the memory
    has a holder, that is watched from here on, until the mappings are gone.

    Raises TransferError for anything that is not exactly as announced, and HolderDied; then nothing is left mapped.
    """
    with fds:
        manifest = granted_manifest(grant, fds, config=config, where=where)
        return map_granted(manifest, grant, fds, config=config, where=where, on_holder_lost=on_holder_lost)


def granted_manifest(grant: Grant, fds: OwnedFds, *, config: CacheConfig, where: str) -> Manifest:
    """The manifest that ``grant`` announces. ``fds`` stay the caller's. Raises TransferError."""
    held = kind_of(config).dies_with_holder
    expected = 1 + len(grant.segments) + held
    if len(fds) != expected:
        raise TransferError(
            "another number of descriptors than the grant needs",
            expected=f"{expected}: the manifest, {len(grant.segments)} segments{' and their holder' if held else ''}",
            found=len(fds),
            where=where,
        )
    return Manifest.decode(_manifest_bytes(grant, fds[0], where))


def map_granted(
    manifest: Manifest,
    grant: Grant,
    fds: OwnedFds,
    *,
    config: CacheConfig,
    where: str,
    on_holder_lost: OnHolderLost = "exit",
) -> Mapped:
    """Map the segments that go with ``manifest``. ``fds`` stay the caller's, but for a holder's, which is taken. Raises
    TransferError, and HolderDied.
    """
    _require_same_generation(manifest, grant, config, where)
    kind = kind_of(config)
    sizes = [segment.nbytes for segment in grant.segments]
    for number, nbytes in enumerate(sizes):
        kind.verify(fds[1 + number], nbytes=nbytes, what=f"segment {number}", read_only=True)
    if not kind.dies_with_holder:
        return Mapped(manifest, map_segments([fds[1 + number] for number in range(len(sizes))], sizes, kind))
    return Mapped(manifest, _held_segments(fds, sizes, kind, where, on_holder_lost))


def _held_segments(
    fds: OwnedFds, sizes: list[int], kind: MemoryKind, where: str, on_lost: OnHolderLost
) -> tuple[SegmentMapping, ...]:
    """Open each segment and watch the holder, whose descriptor is the last. A holder that ends meanwhile is found out
    about: afterwards it is the watch that does.
    """
    holder = len(fds) - 1
    require_process(fds[holder], where=where)
    try:
        segments = map_segments([fds[1 + number] for number in range(len(sizes))], sizes, kind)
    except WeightCacheError:
        require_alive(fds[holder], where=where)  # what the driver says then is not the reason
        raise
    try:
        require_alive(fds[holder], where=where)
        watch = HolderWatch(fds.take(holder), where=where, on_lost=on_lost)
    except BaseException:
        give_up(*segments)
        raise
    for segment in segments:
        cast("IpcMapping", segment).keep(watch)
    return segments


def map_segments(fds: Sequence[int], sizes: Sequence[int], kind: MemoryKind = host) -> tuple[SegmentMapping, ...]:
    """Map each segment for an engine; ``fds`` stay the caller's. All or nothing: TransferError leaves none mapped."""
    segments: list[SegmentMapping] = []
    try:
        for fd, nbytes in zip(fds, sizes, strict=True):
            segments.append(kind.map_private(fd, nbytes=nbytes))
    except BaseException:
        give_up(*segments)
        raise
    return tuple(segments)


def _manifest_bytes(grant: Grant, fd: int, where: str) -> bytes:
    nbytes = grant.manifest_nbytes
    if nbytes > MANIFEST_MAX_BYTES:
        raise TransferError(
            "the manifest is too large", expected=f"at most {MANIFEST_MAX_BYTES} bytes", found=nbytes, where=where
        )
    host.verify(fd, nbytes=nbytes, what="the manifest", read_only=True)
    data = os.pread(fd, nbytes, 0)
    found = hashlib.sha256(data).hexdigest()
    if found != grant.manifest_sha256:
        raise TransferError(
            "the manifest is not the one that was granted", expected=grant.manifest_sha256, found=found, where=where
        )
    return data


def _require_same_generation(manifest: Manifest, grant: Grant, config: CacheConfig, where: str) -> None:
    meta = manifest.meta
    sizes = tuple(segment.nbytes for segment in grant.segments)
    claims = {
        "generation": (grant.generation, meta.generation),
        "receipts version": (grant.receipts_version, meta.receipts_version),
        "config fingerprint": (config.fingerprint, meta.fingerprint),
        "memory kind": ((config.memory,) * len(sizes), tuple(segment.memory for segment in grant.segments)),
        "segment sizes": (sizes, meta.segments_nbytes),
    }
    for what, (expected, found) in claims.items():
        if expected != found:
            raise TransferError(
                f"grant and manifest disagree about the {what}", expected=expected, found=found, where=where
            )
