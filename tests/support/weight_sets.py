"""Weight sets without a daemon: over an honest grant's memory, or over any rows and bytes."""

import os
from collections.abc import Sequence

from weightcached.client import WeightSet
from weightcached.client.transfer import map_segments
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.manifest import Manifest, ManifestMeta, NameAccounting, Row, encode_manifest
from weightcached.protocol.testing import HonestGrant, sealed_memory


def weights_of_grant(grant: HonestGrant) -> WeightSet:
    """A weight set over a grant's memory."""
    return WeightSet(
        Manifest.decode(grant.manifest),
        map_segments([grant.fds[1]], [len(grant.segment)]),
        source="disk",
        version=grant.message.version,
        receipts_version=grant.message.receipts_version,
        lease=None,
    )


def plain_row(
    name: str,
    offset: int,
    nbytes: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: str,
    *,
    segment: int = 0,
    alias_of: str | None = None,
) -> Row:
    """A row whose digest nobody asks for."""
    return Row(
        name=name,
        segment=segment,
        offset=offset,
        nbytes=nbytes,
        shape=shape,
        stride=stride,
        dtype=dtype,
        digest=bytes(16),
        alias_of=alias_of,
    )


def weights_of_rows(rows: Sequence[Row], *segments: bytes, config: CacheConfig) -> WeightSet:
    """A weight set whose segments hold ``segments``, with ``rows`` in them."""
    meta = ManifestMeta(
        generation="0" * 32,
        version="v",
        receipts_version="r",
        fingerprint=config.fingerprint,
        config=config.model_dump(),
        digest=None,
        segments_nbytes=tuple(map(len, segments)),
        bytes_read=0,
        bytes_kept=0,
        seconds={},
    )
    manifest = Manifest.decode(encode_manifest(meta, rows, NameAccounting()))
    fds = [sealed_memory(data) for data in segments]
    try:
        mapped = map_segments(fds, list(map(len, segments)))
    finally:
        for fd in fds:
            os.close(fd)
    return WeightSet(manifest, mapped, source="disk", version="v", receipts_version="r", lease=None)
