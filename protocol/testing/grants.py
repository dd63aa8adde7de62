"""An honest grant, whole and small, so that a scripted daemon can be honest up to any point.

Owns :func:`honest_grant`: sealed segments with a few tensors, their manifest, and the message that announces them, made
with the same code as a real daemon's. For tests.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import xxhash

from weightcached.protocol.config import CacheConfig, Provenance
from weightcached.protocol.content import version_of
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import (
    ManifestMeta,
    NameAccounting,
    Row,
    align,
    contiguous_stride,
    encode_manifest,
)
from weightcached.protocol.memory import host
from weightcached.protocol.messages import AccountingCounts, Grant, SegmentInfo
from weightcached.protocol.testing.steps import Send


@dataclass(frozen=True)
class TensorBytes:
    """One contiguous tensor: ``data`` in C order, of as many bytes as ``shape`` and ``dtype`` need."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != math.prod(self.shape) * itemsize_bytes(self.dtype):
            raise ValueError(f"{len(self.data)} bytes are not {self.dtype} of shape {self.shape}")


@dataclass(frozen=True)
class HonestGrant:
    """A :class:`Grant` with what it announces. ``fds`` stay the grant's own: the manifest, then the segments."""

    message: Grant
    manifest: bytes
    segment: bytes
    """The first, which is all unless more were asked for."""
    fds: tuple[int, ...]

    def step(self) -> Send:
        """The step that sends it."""
        return Send(self.message, self.fds)

    @contextmanager
    def with_manifest(self, manifest: bytes) -> Iterator[HonestGrant]:
        """The same grant with other bytes for a manifest, announced with their true size and digest."""
        message = self.message.model_copy(
            update={"manifest_sha256": hashlib.sha256(manifest).hexdigest(), "manifest_nbytes": len(manifest)}
        )
        with OwnedFds([sealed_memory(manifest)]) as fds:
            yield replace(self, message=message, manifest=manifest, fds=(fds[0], *self.fds[1:]))


@contextmanager
def honest_grant(
    tensors: Mapping[str, TensorBytes],
    *,
    config: CacheConfig,
    receipts: str | None = None,
    digest: str | None = None,
    aliases: Mapping[str, str] | None = None,
    segment_count: int = 1,
) -> Iterator[HonestGrant]:
    """Place ``tensors`` and grant them; the descriptors are closed when the block ends. They lie in one segment, or are
    dealt over ``segment_count`` in turn.

    ``aliases`` are further names, each for one of ``tensors``. ``receipts`` and ``digest`` (64 hex digits, at least
    one) say which checkpoint it is; the version follows from them and ``config`` as a daemon's does.
    """
    rows, segments = _placed(tensors, aliases or {}, segment_count)
    sizes = tuple(len(segment) for segment in segments)
    rankless = config.rankless_fingerprint
    meta = ManifestMeta(
        generation=secrets.token_hex(16),
        version=version_of(rankless, digest=digest, receipts=receipts),
        receipts_version=version_of(rankless, digest=None if receipts else digest, receipts=receipts),
        fingerprint=config.fingerprint,
        config=config.model_dump(),
        digest=digest,
        segments_nbytes=sizes,
        bytes_read=sum(sizes),
        bytes_kept=sum(sizes),
        seconds={"read": 0.0},
    )
    names = tuple(row.name for row in rows)
    manifest = encode_manifest(meta, rows, NameAccounting(expected=names, loaded=names))
    message = Grant(
        generation=meta.generation,
        version=meta.version,
        receipts_version=meta.receipts_version,
        nonce=secrets.token_hex(16),
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        manifest_nbytes=len(manifest),
        segments=tuple(SegmentInfo(memory="host", nbytes=nbytes) for nbytes in sizes),
        resident_nbytes=sum(sizes) + len(manifest),
        accounting=AccountingCounts(expected=len(names), loaded=len(names), ignored=0, unexpected=0),
        digest=digest,
        provenance=Provenance(path="/nowhere", host="nowhere"),
    )
    with OwnedFds(map(sealed_memory, (manifest, *segments))) as fds:
        yield HonestGrant(message, manifest, segments[0], tuple(fds))


def _placed(
    tensors: Mapping[str, TensorBytes], aliases: Mapping[str, str], segment_count: int
) -> tuple[list[Row], list[bytes]]:
    rows, segments = [], [bytearray() for _ in range(segment_count)]
    for position, (name, tensor) in enumerate(tensors.items()):
        number = position % segment_count
        segment = segments[number]
        segment += bytes(align(len(segment)) - len(segment))
        rows.append(
            Row(
                name=name,
                segment=number,
                offset=len(segment),
                nbytes=len(tensor.data),
                shape=tensor.shape,
                stride=contiguous_stride(tensor.shape),
                dtype=tensor.dtype,
                digest=xxhash.xxh3_128_digest(tensor.data),
            )
        )
        segment += tensor.data
    by_name = {row.name: row for row in rows}
    rows += [replace(by_name[target], name=name, alias_of=target) for name, target in aliases.items()]
    return rows, [bytes(segment) for segment in segments]


def sealed_memory(data: bytes) -> int:
    """A read-only descriptor of sealed memory that holds ``data``, as segments and manifests travel. The caller's."""
    with OwnedFds([host.allocate(len(data), name="weightcached-test")]) as fds:
        if data:
            os.pwrite(fds[0], data, 0)
        host.seal(fds[0])
        return host.export(fds[0])
