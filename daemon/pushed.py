"""One generation that a trainer fills: a worker is run as for a load, and a trainer's end of it is handed out.

Owns what is the trainer's: the socket that goes with the job, buckets, which are counted at admission, and the version
that is assigned; the exchange with the worker is ``filling.py``'s. The bulk goes from the trainer to the worker, and
nothing of it is seen here. As in ``loading.py`` nothing is visible to anybody before this has returned.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from weightcached.daemon.buckets import make_bucket
from weightcached.daemon.filling import Filling, Identity, admitted, started_filling
from weightcached.daemon.generation import CheckpointReceipts, Generation
from weightcached.daemon.loading import ServedAlready
from weightcached.daemon.progress import ProgressTracker
from weightcached.protocol.assigned import is_assigned
from weightcached.protocol.errors import ProtocolError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host
from weightcached.protocol.messages import Stage, Staged
from weightcached.protocol.worker_messages import Done, Memory, Planned, Push

_RULE = "the weights were pushed: there are no files that receipts could be of"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PushRequest:
    """What is pushed, by whom, and onto what."""

    base: Generation
    stage: Stage
    partial: bool
    trusted_filesystems: tuple[str, ...]
    make_room: Callable[[], Awaitable[bool]]


HandOver = Callable[[Staged, OwnedFds], None]
"""Takes what the trainer is to be sent; owns the descriptors from then on."""


async def load_pushed(request: PushRequest, progress: ProgressTracker, hand_over: HandOver) -> Generation:
    """Run one worker until a trainer has filled everything. The caller owns the generation.

    Raises TransientFailure or the error of a permanent cause; ServedAlready where nothing of ``request.base`` changes
    at any rank. Cancelled or failed, the worker is gone and its memory closed when this returns.
    """
    base, stage = request.base, request.stage
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, OwnedFds() as buckets:
        async with started_filling(base.config, progress) as filling:
            planned = await _plan(filling, request, theirs)
            await _admit(request, planned.segments_nbytes)
            await filling.allocate(planned)
            for _ in range(stage.bucket_count):
                buckets.append(make_bucket(stage.bucket_nbytes))
            await _give_memory(filling, base, buckets)
            progress.update("push weights", bytes_done=0, bytes_total=planned.bytes_to_read)
            staged = Staged(
                generation=filling.generation_id,
                base_version=base.receipts_version,
                bucket_nbytes=stage.bucket_nbytes,
                bucket_count=stage.bucket_count,
            )
            hand_over(staged, OwnedFds([ours.detach(), *buckets.take_all()]))
            return await filling.sealed(planned, lambda done: _identity(request, done))


async def _plan(filling: Filling, request: PushRequest, theirs: socket.socket) -> Planned:
    base, stage = request.base, request.stage
    with OwnedFds([host.export(base.memory[0])]) as kept:
        if request.partial:
            for segment in base.segments:
                kept.append(base.kind.export(segment))
        planned = await filling.plan(
            base.origin.model_dir,
            trusted_filesystems=request.trusted_filesystems,
            push=Push(partial=request.partial, bucket_nbytes=stage.bucket_nbytes, bucket_count=stage.bucket_count),
            fds=[theirs.fileno(), *kept],
        )
    theirs.close()  # the worker's end is the only one from here on: its death is seen by the trainer, too
    return planned


async def _admit(request: PushRequest, segments_nbytes: tuple[int, ...]) -> None:
    """Room for the segments in their memory, and for the buckets in the host's."""
    kind, stage = request.base.kind, request.stage
    buckets_nbytes = (stage.bucket_nbytes,) * stage.bucket_count
    if kind is host:
        room = await admitted(kind, (*segments_nbytes, *buckets_nbytes), request.make_room)
    else:
        room = await admitted(kind, segments_nbytes, request.make_room)
        await admitted(host, buckets_nbytes, None)
    nbytes = {"segments_nbytes": sum(segments_nbytes), "buckets_nbytes": sum(buckets_nbytes)}
    extra = {**nbytes, "free_nbytes": room.free_nbytes, "pushed_by": stage.name, "partial": request.partial}
    log.info("planned", extra=extra)


async def _give_memory(filling: Filling, base: Generation, buckets: OwnedFds) -> None:
    with OwnedFds() as readable:
        for bucket in buckets:
            readable.append(host.export(bucket))
        await filling.hand_over(
            Memory(version=base.version, receipts_version=base.receipts_version, digest=None), list(readable)
        )


def _identity(request: PushRequest, done: Done) -> Identity:
    base, version = request.base, done.assigned_version
    if version == base.receipts_version:
        raise ServedAlready(f"generation {base.id}")
    if version is None or not is_assigned(version):
        raise ProtocolError("the worker took what was pushed without a version of its own", found=version)
    return Identity(
        config=base.config,
        receipts=CheckpointReceipts.unknown(_RULE),
        receipts_version=version,
        digest=None,
        provenance=base.provenance,
        origin=base.origin,
        engine_inputs=base.engine_inputs,
        pushed_by=request.stage.name,
    )
