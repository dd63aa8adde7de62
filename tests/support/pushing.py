"""Pushing without a daemon: the worker's side is a thread of this process, and the client's `RankPush` the trainer.

    with loaded_base(directory, config) as base, pushing(directory, config, base) as push:
        push.push(tensors)
        manifest = push.finish()

What the worker refuses reaches the trainer as from a keeper. Real workers under real daemons push in tests/daemon.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from tests.support.workers import GENERATION, TIMEOUT_S
from weightcached.client.publish.rank import RankPush
from weightcached.client.publish.values import Box, Given, Value
from weightcached.daemon.buckets import make_bucket
from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.failing import report
from weightcached.loader.filling import to_be_filled
from weightcached.loader.pushed.source import open_push
from weightcached.loader.sources import Filled
from weightcached.protocol.assigned import assigned_version
from weightcached.protocol.channel import Channel
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory.kinds import kind_of
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Refused, Staged
from weightcached.protocol.places import Place
from weightcached.protocol.testing import sealed_memory
from weightcached.protocol.worker_messages import Job, Push

BASE = "fedcba9876543210" * 2
BASE_VERSION = "digest:" + "1" * 64
BUCKET_NBYTES = 64 * 1024


@dataclass
class Base:
    """A generation that is served: its sealed segments, then its manifest, whose descriptors belong to ``fds``."""

    manifest: Manifest
    fds: OwnedFds


@contextmanager
def loaded_base(directory: Path, config: CacheConfig) -> Iterator[Base]:
    """Load ``directory`` as a worker does, here."""
    with OwnedFds() as fds, open_checkpoint(directory) as checkpoint:
        kind = kind_of(config)
        prepared = pipeline.prepare(checkpoint, config, segment_max_nbytes=kind.segment_max_nbytes)
        sizes = prepared.placement.segments_nbytes
        fds.extend(kind.allocate(nbytes, name="base") for nbytes in sizes)
        with to_be_filled(list(fds), kind, nbytes=sizes) as target:
            loaded = pipeline.load(checkpoint, prepared, target)
        for fd in fds:
            kind.seal(fd)
        data = pipeline.encode(
            loaded, prepared, generation=BASE, version=BASE_VERSION, receipts_version=BASE_VERSION, digest=None
        )
        fds.append(sealed_memory(data))
        yield Base(Manifest.decode(data), fds)


@dataclass
class Pushing:
    """One push. ``finish`` is the whole end of one that goes well."""

    trainer: RankPush
    config: CacheConfig
    segments: list[int]
    outcome: Future[Filled]
    progress: list[tuple[int, int]]
    data: dict[str, bytes] = field(default_factory=dict)
    """Of every row, once it is finished."""

    def push(self, tensors: Mapping[str, Value]) -> None:
        """Every box of each."""
        for name, value in tensors.items():
            whole = tuple(slice(0, extent) for extent in self.trainer.table[name].shape)
            for box in self.trainer.boxes(name):
                self.trainer.push(name, Given(self.trainer.table[name], value, whole), box)

    def push_box(self, name: str, box: Box, value: Value) -> None:
        """These elements."""
        self.trainer.push(name, Given(self.trainer.table[name], value, box), box)

    def finish(self) -> Manifest:
        """Finish, assign, and make the manifest. Every row has to have the digest of its bytes."""
        self.trainer.finish()
        version = assigned_version(BASE_VERSION, {"only": self.trainer.filled().resident})
        self.trainer.assign(version)
        filled = self.outcome.result(TIMEOUT_S)
        assert filled.assigned_version == version
        manifest = Manifest.decode(
            filled.encode(generation=GENERATION, version=version, receipts_version=version, digest=None)
        )
        kind = kind_of(self.config)
        for number, (segment, nbytes) in enumerate(zip(self.segments, manifest.meta.segments_nbytes, strict=True)):
            kind.seal(segment)
            with closing(kind.map_readonly(segment, nbytes=nbytes)) as mapping:
                view = mapping.view()
                for row in (row for row in manifest if row.segment == number):
                    data = self.data[row.name] = bytes(view[row.offset : row.offset + row.nbytes])
                    assert xxhash.xxh3_128(data).digest() == row.digest, row.name
                del view
        return manifest


@contextmanager
def pushing(
    directory: Path,
    config: CacheConfig,
    base: Base,
    *,
    partial: bool = False,
    bucket_nbytes: int = BUCKET_NBYTES,
    bucket_count: int = 3,
) -> Iterator[Pushing]:
    """A worker's thread that was given its memory, and a trainer that has heard what is wanted."""
    with ExitStack() as held:
        kind, sizes = kind_of(config), base.manifest.meta.segments_nbytes
        segments = held.enter_context(OwnedFds(kind.allocate(nbytes, name="segment") for nbytes in sizes))
        buckets = held.enter_context(OwnedFds([make_bucket(bucket_nbytes) for _ in range(bucket_count)]))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        keeper_end, trainer_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        push = Push(partial=partial, bucket_nbytes=bucket_nbytes, bucket_count=bucket_count)
        *kept, manifest = base.fds
        given = OwnedFds([theirs.detach(), os.dup(manifest), *(map(os.dup, kept) if partial else [])])
        job = Job(
            model_dir=str(directory),
            config=config.model_dump(),
            generation=GENERATION,
            keeper_pid=os.getpid(),
            push=push,
        )
        outcome: Future[Filled] = Future()
        progress: list[tuple[int, int]] = []

        def work() -> None:
            """What a worker and its keeper do."""
            keeper = Channel(keeper_end, outgoing=DAEMON_TO_CLIENT, incoming=CLIENT_TO_DAEMON)
            with closing(keeper), given:
                try:
                    with open_push(job, push, config, given) as source:
                        source.buckets = [buckets[number] for number in range(bucket_count)]
                        with to_be_filled(list(segments), kind, nbytes=sizes, computes=source.uses_torch) as target:
                            outcome.set_result(source.fill(target, lambda *done: progress.append(done)))
                except Exception as failure:  # noqa: BLE001 - raised again for whoever asks for the outcome
                    outcome.set_exception(failure)
                    with suppress(PeerClosed):  # a trainer that has gone is told nothing
                        keeper.send(Refused(**report(failure).model_dump(exclude={"transient"})))

        thread = threading.Thread(target=work, name="the worker")
        thread.start()
        held.callback(thread.join)
        staged = Staged(
            generation=GENERATION, base_version=BASE_VERSION, bucket_nbytes=bucket_nbytes, bucket_count=bucket_count
        )
        trainer = RankPush.of(
            Place(Path("/run/weightcached"), "default", "host-tp0of1"),
            Channel(trainer_end, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT),
            staged,
            OwnedFds([ours.detach(), *(os.dup(buckets[number]) for number in range(bucket_count))]),
            deadline=Deadline.after(TIMEOUT_S),
        )
        held.callback(trainer.close)
        yield Pushing(trainer, config, list(segments), outcome, progress)
