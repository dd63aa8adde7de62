"""The worker: ``python -m weightcached.loader.worker --fd N``, started by the keeper to fill one generation.

Speaks `worker_messages.py` over the connected socket it inherits as descriptor N: takes a ``Job``, reports what is
``Planned``, takes the segments, fills them, reports ``Done`` with a sealed manifest, and exits with 0. Anything that
goes wrong is reported as ``Failed`` and exits with 1. It keeps nothing mapped or open that would hold back sealing, and
it dies with its keeper: by the kernel's signal, and at the next word it says. Loads without transforms import no torch.

Of memory that dies with its process it stays the *holder*: when it has reported it keeps that, the context and nothing
else, until the keeper's end of the socket is closed.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from weightcached.loader.destination import Target
from weightcached.loader.failing import report
from weightcached.loader.filling import to_be_filled
from weightcached.loader.sources import Filled, Source, source_of
from weightcached.protocol.channel import Channel
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import (
    InternalError,
    ProtocolError,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.memory import host, names
from weightcached.protocol.memory.kinds import kind_of
from weightcached.protocol.processes import die_with_parent, step_back
from weightcached.protocol.worker_messages import (
    KEEPER_TO_WORKER,
    WORKER_TO_KEEPER,
    Done,
    Job,
    Memory,
    Progress,
)

log = logging.getLogger(__name__)

_STAGE_MAX_CHARACTERS = 200

_LAST_WORDS_NBYTES = 4 << 20
"""Kept for saying what went wrong where that was memory; encoding a message takes a quarter of it."""


def main() -> int:
    """Serve the one job. Returns the exit status: 0 done, 1 failed and said so, 2 nobody left to say it to."""
    parser = argparse.ArgumentParser(prog="weightcached worker", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the connected socket to the keeper")
    parser.add_argument("--yield", action="store_true", dest="yields", help="let everybody else compute and read first")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    if arguments.yields and (refused := step_back()):
        log.warning("could not step back behind everybody else: %s", "; ".join(refused))
    # Ctrl-C reaches the whole foreground group: stopping is the keeper's to decide, and we die with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=arguments.fd)
    connection.set_inheritable(False)
    channel = Channel(connection, outgoing=WORKER_TO_KEEPER, incoming=KEEPER_TO_WORKER)
    spare = bytearray(_LAST_WORDS_NBYTES)
    try:
        memory = _serve(channel)
        if memory is not None:
            spare.clear()
            _hold(channel)
    except PeerClosed:
        log.error("the keeper is gone")
        return 2
    except Exception as failure:  # noqa: BLE001 - whatever it was, the keeper is told, and the process ends
        del spare
        said = report(failure)
        if said.code == InternalError.code:
            traceback.print_exception(failure)
        channel.send(said)
        return 1
    finally:
        channel.close()
    return 0


def _serve(channel: Channel) -> Target | None:
    """Serve the job; what is to be held then, if there is anything."""
    job, given = _job(channel)
    die_with_parent(job.keeper_pid)

    def begins(stage: str) -> None:
        channel.send(Progress(stage=stage[:_STAGE_MAX_CHARACTERS], bytes_done=0, bytes_total=0))

    config = CacheConfig.model_validate(job.config)
    kind = kind_of(config)
    with given, source_of(job, config, given, begins) as source:
        channel.send(source.planned())
        segments = len(source.segments_nbytes)
        buckets = 0 if job.push is None else job.push.bucket_count
        memory, fds = _memory(channel, segments=segments, buckets=buckets)
        with fds:
            source.buckets = list(fds)[segments:]
            if source.uses_torch:
                begins("import torch")
                _prepare_torch()
            stage = "load weights" if job.push is None else "push weights"
            with to_be_filled(
                list(fds)[:segments], kind, nbytes=source.segments_nbytes, computes=source.uses_torch
            ) as target:
                filled = source.fill(
                    target,
                    lambda done, total: channel.send(Progress(stage=stage, bytes_done=done, bytes_total=total)),
                    job.strategy,
                )
        manifest = filled.encode(
            generation=job.generation,
            version=filled.assigned_version or memory.version,
            receipts_version=filled.assigned_version or memory.receipts_version,
            digest=memory.digest,
        )
        _report_done(channel, job, source, filled, manifest)
    return target if kind.dies_with_holder else None


def _report_done(channel: Channel, job: Job, source: Source, filled: Filled, manifest: bytes) -> None:
    with _sealed(manifest, name=names.manifest_name(job.generation)) as fd:
        done = Done(
            manifest_nbytes=len(manifest),
            resident_nbytes=sum(source.segments_nbytes),
            bytes_read=filled.bytes_read,
            bytes_kept=filled.bytes_kept,
            seconds=dict(filled.seconds),
            assigned_version=filled.assigned_version,
        )
        channel.send(done, [fd])


def _hold(channel: Channel) -> None:
    """Stay until the keeper lets go. Nothing is given back then: the end of the process does that, and is what clients
    of the memory are told by; so what is between the two is as short as can be.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as above: a service manager tells every process of the service
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what it computed with, and would keep for another time
    log.info("all is filled: staying, as the holder of the memory")
    try:
        channel.receive()
    except PeerClosed:
        return
    raise ProtocolError("the keeper spoke out of turn", expected="nothing more", found="a frame")


def _job(channel: Channel) -> tuple[Job, OwnedFds]:
    """What is to be done, and the descriptors that came with it, which the caller owns."""
    frame = channel.receive()
    if not isinstance(frame.message, Job):
        frame.fds.close()
        raise ProtocolError("the keeper spoke out of turn", expected="Job", found=type(frame.message).__name__)
    return frame.message, frame.fds


def _memory(channel: Channel, *, segments: int, buckets: int) -> tuple[Memory, OwnedFds]:
    """What the keeper allocated: so many segments, and then buckets, whose descriptors the caller owns."""
    frame = channel.receive()
    if not isinstance(frame.message, Memory) or len(frame.fds) != segments + buckets:
        found = f"{type(frame.message).__name__} with {len(frame.fds)} descriptors"
        frame.fds.close()
        raise ProtocolError(
            "the keeper spoke out of turn", expected=f"Memory with {segments + buckets} descriptors", found=found
        )
    return frame.message, frame.fds


def _prepare_torch() -> None:
    """Import torch for the transforms. Our threads do the work side by side; torch's own would be in their way."""
    import torch

    torch.set_num_threads(1)


@contextmanager
def _sealed(data: bytes, *, name: str) -> Iterator[int]:
    """A sealed memfd with ``data``, closed afterwards."""
    fd = host.allocate(len(data), name=name)
    try:
        view = memoryview(data)
        done = 0
        while done < len(data):
            done += os.pwrite(fd, view[done:], done)
        host.seal(fd)
        yield fd
    finally:
        os.close(fd)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    # The keeper publishes when we have ended, and taking Python and torch down in order takes seconds.
    os._exit(status)
