"""One attempt to load: has a worker fill segments out of a checkpoint, and turns what it reports into a generation, or
into an error.

Owns what the files say about the content, and admission; the exchange with the worker is ``filling.py``'s. Publishing
is the keeper's: nothing is visible to anybody before :func:`load` has returned. Knows nothing of how shards are made.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from weightcached.daemon.filling import Filling, Identity, admitted, started_filling
from weightcached.daemon.generation import CheckpointReceipts, Generation, Origin
from weightcached.daemon.progress import ProgressTracker
from weightcached.daemon.worker_process import TransientFailure
from weightcached.protocol.config import CacheConfig, Provenance
from weightcached.protocol.content import version_of
from weightcached.protocol.errors import DeploymentError, SnapshotMismatch
from weightcached.protocol.transaction import Versions
from weightcached.protocol.worker_messages import LoadStrategy, Memory, Planned

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What to load, and what the keeper knows about it."""

    origin: Origin
    config: CacheConfig
    provenance: Provenance
    trusted_filesystems: tuple[str, ...]
    known_digest: Callable[[CheckpointReceipts], str | None]
    """The content digest that was remembered for these receipts."""
    snapshot: Path | None = None
    """Load this rank's part of the snapshot in this directory, instead of the weights of the checkpoint."""
    strategy: LoadStrategy = "auto"
    engine_arguments: tuple[str, ...] = ()
    """Of the engine that makes the config's layout, where there is one."""
    engine_inputs: str | None = None
    """What its key was computed from, as one hash."""
    yields: bool = False
    """Processors and disk go to everybody else first: engines compute with what is served meanwhile."""
    make_room: Callable[[], Awaitable[bool]] | None = None
    """Gives back some memory that is not needed; whether there was any. Asked as long as the shard does not fit."""
    served: Generation | None = None
    """What is served: where the files are seen to be those that it came from, nothing is loaded."""


class ServedAlready(Exception):
    """What a change would make is what is served: nothing is to be made. Of files: those that ``served`` of the request
    came from, of which nothing was read; of a push: it left every byte as it was.
    """


async def load(request: LoadRequest, progress: ProgressTracker) -> Generation:
    """Run one worker to the end. The caller owns the generation.

    Raises TransientFailure (the worker died, or said that trying again may help, or no descriptor is left, but clients
    may give some back) or the error of a permanent cause. Cancelled or failed, the worker is gone and its memory closed
    when this returns. ServedAlready where ``request.served`` came from these files.
    """
    try:
        return await _loaded(request, progress)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise TransientFailure(
            DeploymentError(
                "the daemon has no descriptor left to load with",
                found=error.strerror,
                next_step="raise the daemon's limit on open files (LimitNOFILE=, ulimit -n), or end engines",
            )
        ) from error


async def _loaded(request: LoadRequest, progress: ProgressTracker) -> Generation:
    async with started_filling(request.config, progress, yields=request.yields) as filling:
        planned = await filling.plan(
            request.origin.model_dir,
            trusted_filesystems=request.trusted_filesystems,
            snapshot=None if request.snapshot is None else os.fspath(request.snapshot),
            strategy=request.strategy,
            engine_arguments=request.engine_arguments,
        )
        receipts, digest = _content(planned, request)
        if request.served is not None and request.served.is_of(request.origin, receipts):
            raise ServedAlready(f"generation {request.served.id}")
        await _admit(filling, planned, request)
        await filling.allocate(planned)
        versions = _versions(request.config, receipts, digest)
        await filling.hand_over(
            Memory(version=versions.version, receipts_version=versions.receipts_version, digest=digest)
        )
        identity = Identity(
            config=request.config,
            receipts=receipts,
            receipts_version=versions.receipts_version,
            digest=digest,
            provenance=request.provenance,
            origin=request.origin,
            engine_inputs=request.engine_inputs,
        )
        return await filling.sealed(planned, lambda done: identity)


async def _admit(filling: Filling, planned: Planned, request: LoadRequest) -> None:
    room = await admitted(filling.kind, planned.segments_nbytes, request.make_room)
    log.info(
        "planned",
        extra={
            "segments_nbytes": list(planned.segments_nbytes),
            "bytes_to_read": planned.bytes_to_read,
            "free_nbytes": room.free_nbytes,
            "tightest_limit": room.source,
            "receipts_trusted": planned.receipts_trusted,
            "receipts_rule": planned.receipts_rule,
        },
    )


def _versions(config: CacheConfig, receipts: CheckpointReceipts, digest: str | None) -> Versions:
    rankless = config.rankless_fingerprint
    # Where no file was seen, ranks have the digest to compare from the start.
    stands_in = None if receipts.known else digest
    return Versions(
        version_of(rankless, digest=digest, receipts=receipts.sha256),
        version_of(rankless, digest=stands_in, receipts=receipts.sha256),
    )


def _content(planned: Planned, request: LoadRequest) -> tuple[CheckpointReceipts, str | None]:
    """Receipts of the files that the weights come from, and their digest where it is known already.

    A snapshot says which content it was made from, and nothing is read to check that. Where the checkpoint is there to
    be seen and was digested before, it has to be the same: SnapshotMismatch. Then its receipts prove what is loaded.
    """
    receipts = _receipts(planned)
    remembered = request.known_digest(receipts)
    if planned.digest is None:
        return receipts, remembered
    if remembered is None:
        return CheckpointReceipts.unknown(
            "the weights come from a snapshot, which only a digest can prove"
        ), planned.digest
    if remembered != planned.digest:
        raise SnapshotMismatch(
            "the snapshot was made from another checkpoint than the one that is there now",
            expected=f"content digest {remembered}",
            found=f"content digest {planned.digest}",
            where=request.origin.model_dir,
            next_step="make the snapshot again with `weightcached snapshot save`, or load without --snapshot",
        )
    return receipts, planned.digest


def _receipts(planned: Planned) -> CheckpointReceipts:
    """Receipts of files written a moment ago prove nothing: the next edit might leave the same times."""
    if planned.receipts is None:
        return CheckpointReceipts.unknown("no weight files were there to be seen")
    if planned.receipts_trusted and planned.receipts_young:
        rule = "the files were written less than two seconds before they were read"
        return CheckpointReceipts(planned.receipts, trusted=False, rule=rule)
    return CheckpointReceipts(planned.receipts, trusted=planned.receipts_trusted, rule=planned.receipts_rule)
