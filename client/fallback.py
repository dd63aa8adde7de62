"""The way without a daemon: the same loader, in this process, into this process's own memory.

Owns :func:`load_from_disk`. The loader, and with it torch, is imported only when it is called. Offsets, names and
digests are those that a daemon would have made: the same plan, the same code, the same kind of sealed memory.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection
from pathlib import Path

from weightcached.client.exchange import Progress
from weightcached.client.transfer import map_segments
from weightcached.client.weights import WeightSet
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.content import Receipts, version_of
from weightcached.protocol.digest_cache import DigestCache, cache_directory
from weightcached.protocol.digests import digest_of
from weightcached.protocol.errors import CheckpointMismatch
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory.kinds import kind_of
from weightcached.protocol.messages import Loading

logger = logging.getLogger("weightcached.client")


def load_from_disk(
    model_dir: Path,
    config: CacheConfig,
    *,
    digest: str | None,
    cache_dir: Path | None,
    also_trusted: Collection[str],
    progress: Progress | None,
) -> WeightSet:
    """Load this rank's shard of ``model_dir``. Blocks; ``progress`` is called by the loader's threads, one at a time.

    A stated ``digest`` is compared with the files' before anything is loaded: CheckpointMismatch. InsufficientMemory
    where the shard does not fit in what is free. Raises what the loader raises for bad files and models it does not
    know; nothing stays open, mapped or allocated then.
    """
    from weightcached.loader.checkpoint import open_checkpoint
    from weightcached.loader.filling import to_be_filled
    from weightcached.loader.pipeline import encode, load, prepare

    started_s = time.monotonic()
    with open_checkpoint(model_dir, also_trusted=also_trusted) as checkpoint:
        if digest is not None:
            _require_digest(model_dir, digest, checkpoint.receipts, cache_dir=cache_dir, also_trusted=also_trusted)
        kind = kind_of(config)
        prepared = prepare(checkpoint, config, segment_max_nbytes=kind.segment_max_nbytes)
        sizes = prepared.placement.segments_nbytes
        kind.admit(sum(map(kind.resident_nbytes, sizes)))
        with OwnedFds() as memory:
            for nbytes in sizes:
                memory.append(kind.allocate(nbytes, name="weightcached:disk"))
            fds = list(memory)
            computes = prepared.placement.transforms
            with to_be_filled(fds, kind, nbytes=sizes, computes=computes) as target:
                loaded = load(checkpoint, prepared, target, also_trusted=also_trusted, progress=_reporting(progress))
            for fd in fds:
                kind.seal(fd)
            rankless, receipts = config.rankless_fingerprint, checkpoint.receipts.sha256
            version = version_of(rankless, digest=digest, receipts=receipts)
            receipts_version = version_of(rankless, digest=None, receipts=receipts)
            manifest = encode(
                loaded,
                prepared,
                generation=secrets.token_hex(16),
                version=version,
                receipts_version=receipts_version,
                digest=digest,
            )
            segments = map_segments(fds, sizes, kind)
    logger.info("loaded %.3f GB from %s in %.2f s", sum(sizes) / 1e9, model_dir, time.monotonic() - started_s)
    return WeightSet(
        Manifest.decode(manifest),
        segments,
        source="disk",
        version=version,
        receipts_version=receipts_version,
        lease=None,
    )


def _require_digest(
    model_dir: Path, wanted: str, receipts: Receipts, *, cache_dir: Path | None, also_trusted: Collection[str]
) -> None:
    """The content must be what was stated: remembered on this host, else one pass over the bytes."""
    cache = DigestCache(cache_directory(cache_dir))
    found = digest_of(model_dir, cache, also_trusted=also_trusted, expect_receipts=receipts.sha256)
    if found.hex != wanted:
        raise CheckpointMismatch(
            "the checkpoint on disk is not the content that was asked for",
            expected=f"digest {wanted}",
            found=f"digest {found.hex}",
            where=model_dir,
            next_step="point the engine at the right checkpoint, or state this one's digest",
        )


def _reporting(progress: Progress | None) -> Callable[[int, int], None] | None:
    """The loader's bytes done and in all, as the reports that a daemon sends."""
    if progress is None:
        return None
    started_s = time.monotonic()

    def report(done: int, total: int) -> None:
        rate = done / max(time.monotonic() - started_s, 1e-6)
        progress(Loading(stage="read", bytes_done=done, bytes_total=total, bytes_per_s=rate))

    return report
