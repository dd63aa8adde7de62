"""One generation that a trainer fills: a worker is run as for a load, and a trainer's end of it is handed out.

Owns the order: job and socket → plan → admission, buckets counted → memory → hand-over → manifest → sealing. The bulk
goes from the trainer to the worker; nothing of it is seen here. As in ``loading.py`` nothing is visible to anybody
before this has returned.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from weightcached.daemon.buckets import make_bucket
from weightcached.daemon.generation import CheckpointReceipts, Generation, sha256_of
from weightcached.daemon.loading import (
    Worker,
    admitted,
    allocate,
    check_manifest,
    out_of_turn,
    started_worker,
)
from weightcached.daemon.patience import in_thread
from weightcached.daemon.progress import ProgressTracker
from weightcached.protocol.assigned import is_assigned
from weightcached.protocol.errors import ProtocolError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host, names
from weightcached.protocol.messages import Stage, Staged
from weightcached.protocol.worker_messages import Done, Job, Memory, Planned, Push

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

    Raises TransientFailure or the error of a permanent cause. Cancelled or failed, the worker is gone and its memory
    closed when this returns.
    """
    base, stage = request.base, request.stage
    generation_id, kind = secrets.token_hex(16), base.kind
    progress.update("start worker")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, OwnedFds() as memory, OwnedFds() as buckets:
        async with started_worker() as worker:
            planned = await _plan(worker, request, generation_id, theirs, progress)
            await _admit(request, planned.segments_nbytes)
            for number, size in enumerate(planned.segments_nbytes):
                name = names.segment_name(generation_id, number)
                await in_thread(partial(allocate, memory, kind, size, name))
            for _ in range(stage.bucket_count):
                buckets.append(make_bucket(stage.bucket_nbytes))
            await _give_memory(worker, base, memory, buckets)
            progress.update("push weights", bytes_done=0, bytes_total=planned.bytes_to_read)
            staged = Staged(
                generation=generation_id,
                base_version=base.receipts_version,
                bucket_nbytes=stage.bucket_nbytes,
                bucket_count=stage.bucket_count,
            )
            hand_over(staged, OwnedFds([ours.detach(), *buckets.take_all()]))
            done, manifest = await worker.receive(progress)
            with manifest:
                version = _assigned(done)
                if not isinstance(done, Done):
                    raise out_of_turn(done, expected="Done")
                check_manifest(done, manifest)
                progress.update("seal")
                await worker.seal(memory, kind)
                sha256 = await sha256_of(manifest[0], nbytes=done.manifest_nbytes)
                holder = worker.stay(memory) if kind.dies_with_holder else None
                return Generation(
                    id=generation_id,
                    config=base.config,
                    manifest_sha256=sha256,
                    holder=holder,
                    memory=OwnedFds([manifest.take(0), *memory.take_all()]),
                    manifest_nbytes=done.manifest_nbytes,
                    segments_nbytes=planned.segments_nbytes,
                    resident_nbytes=sum(map(kind.resident_nbytes, planned.segments_nbytes)),
                    bytes_read=0,
                    bytes_kept=done.bytes_kept,
                    accounting=planned.accounting,
                    receipts=CheckpointReceipts.unknown(_RULE),
                    receipts_version=version,
                    digest=None,
                    provenance=base.provenance,
                    origin=base.origin,
                    seconds=done.seconds,
                    engine_inputs=base.engine_inputs,
                    pushed_by=stage.name,
                )


async def _plan(
    worker: Worker, request: PushRequest, generation_id: str, theirs: socket.socket, progress: ProgressTracker
) -> Planned:
    base, stage = request.base, request.stage
    with OwnedFds([host.export(base.memory[0])]) as kept:
        if request.partial:
            for segment in base.segments:
                kept.append(base.kind.export(segment))
        await worker.send(
            Job(
                model_dir=base.origin.model_dir,
                config=base.config.model_dump(),
                generation=generation_id,
                keeper_pid=os.getpid(),
                trusted_filesystems=request.trusted_filesystems,
                push=Push(partial=request.partial, bucket_nbytes=stage.bucket_nbytes, bucket_count=stage.bucket_count),
            ),
            [theirs.fileno(), *kept],
        )
    theirs.close()  # the worker's end is the only one from here on: its death is seen by the trainer, too
    planned, none = await worker.receive(progress)
    none.close()
    if not isinstance(planned, Planned):
        raise out_of_turn(planned, expected="Planned")
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


async def _give_memory(worker: Worker, base: Generation, memory: OwnedFds, buckets: OwnedFds) -> None:
    with OwnedFds([host.export(buckets[number]) for number in range(len(buckets))]) as readable:
        await worker.send(
            Memory(version=base.version, receipts_version=base.receipts_version, digest=None),
            [*memory, *readable],
        )


def _assigned(done: Planned | Done) -> str:
    version = done.assigned_version if isinstance(done, Done) else None
    if version is None or not is_assigned(version):
        raise ProtocolError("the worker took what was pushed without a version of its own", found=version)
    return version
