"""Pushing to a real worker process without a daemon: the test is its keeper, and the client's `RankPush` the trainer.

with loaded_base(directory, config) as base, pushing(directory, config, base) as push:
    push.trainer.push(...)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from tests.support.workers import GENERATION, TIMEOUT_S, VERSION, Running, worker
from weightcached.client.publish.rank import RankPush
from weightcached.client.publish.values import Box, Given, Value
from weightcached.daemon.buckets import make_bucket
from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.protocol.assigned import assigned_version
from weightcached.protocol.channel import Channel
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory import host
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Refused, Staged
from weightcached.protocol.places import Place
from weightcached.protocol.testing import sealed_memory
from weightcached.protocol.worker_messages import Done, Job, Memory, Planned, Push

BASE = "fedcba9876543210" * 2
BASE_VERSION = "digest:" + "1" * 64
BUCKET_NBYTES = 64 * 1024


@dataclass
class Base:
    """A generation that is served: sealed manifest and segment, whose descriptors belong to ``fds``."""

    manifest: Manifest
    fds: OwnedFds


@contextmanager
def loaded_base(directory: Path, config: CacheConfig) -> Iterator[Base]:
    """Load ``directory`` as a worker does, here."""
    with OwnedFds() as fds, open_checkpoint(directory) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config)
        segment = host.allocate(prepared.placement.segment_nbytes, name="base")
        fds.append(segment)
        loaded = pipeline.load(checkpoint, prepared, segment)
        host.seal(segment)
        data = pipeline.encode(
            loaded, prepared, generation=BASE, version=BASE_VERSION, receipts_version=BASE_VERSION, digest=None
        )
        fds.append(sealed_memory(data))
        yield Base(Manifest.decode(data), fds)


@dataclass
class Pushing:
    """One push. ``finish`` is the whole end of one that goes well."""

    running: Running
    trainer: RankPush
    segment: int
    planned: Planned
    keeper_side: Channel
    """The other end of the trainer's connection to the daemon."""
    done: Done | None = None
    manifest: Manifest | None = None
    data: dict[str, bytes] = field(default_factory=dict)

    def push(self, tensors: Mapping[str, Value]) -> None:
        """Every box of each."""
        for name, value in tensors.items():
            for box in self.trainer.boxes(name):
                whole = self.trainer.table[name]
                given = Given(whole, value, tuple(slice(0, extent) for extent in whole.shape))
                self.trainer.push(name, given, box)

    def push_box(self, name: str, box: Box, value: Value) -> None:
        """These elements."""
        self.trainer.push(name, Given(self.trainer.table[name], value, box), box)

    def finish(self) -> Manifest:
        """Finish, assign, and read what the worker reports. Every row has to have the digest of its bytes."""
        self.trainer.finish()
        filled = self.trainer.filled()
        self.trainer.assign(assigned_version(BASE_VERSION, {"only": filled.resident}))
        self.done = self.running.expect(Done)
        manifest_fd = self.running.fds[len(self.running.fds) - 1]
        manifest = self.manifest = Manifest.decode(os.pread(manifest_fd, self.done.manifest_nbytes, 0))
        assert self.running.exit_status() == 0
        host.seal(self.segment)
        for row in manifest:
            data = self.data[row.name] = os.pread(self.segment, row.nbytes, row.offset)
            assert xxhash.xxh3_128(data).digest() == row.digest, row.name
        return manifest

    def refused(self) -> Any:
        """The worker's failure, which a keeper would tell the trainer."""
        failed = self.running.failure()
        self.keeper_side.send(Refused(**failed.model_dump(exclude={"transient"})))
        return failed


@contextmanager
def pushing(
    directory: Path,
    config: CacheConfig,
    base: Base,
    *,
    partial: bool = False,
    bucket_nbytes: int = BUCKET_NBYTES,
    bucket_count: int = 3,
    change: Callable[[Job], Job] = lambda job: job,
) -> Iterator[Pushing]:
    """A worker that was given its memory, and a trainer that has heard what is wanted."""
    with ExitStack() as held:
        running = held.enter_context(worker())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        held.callback(ours.close)
        job = Job(
            model_dir=str(directory),
            config=config.model_dump(),
            generation=GENERATION,
            keeper_pid=os.getpid(),
            push=Push(partial=partial, bucket_nbytes=bucket_nbytes, bucket_count=bucket_count),
        )
        with theirs:
            fds = [theirs.fileno(), base.fds[1], *([base.fds[0]] if partial else [])]
            running.channel.send(change(job), fds, deadline=Deadline.after(TIMEOUT_S))
        planned = running.expect(Planned)
        (nbytes,) = planned.segments_nbytes
        segment = host.allocate(nbytes, name="segment")
        running.fds.append(segment)
        buckets = held.enter_context(OwnedFds())
        for _ in range(bucket_count):
            buckets.append(make_bucket(bucket_nbytes))
        readable = held.enter_context(OwnedFds([host.export(buckets[number]) for number in range(bucket_count)]))
        memory = Memory(version=VERSION, receipts_version=VERSION, digest=None)
        running.channel.send(
            memory,
            [segment, *(readable[number] for number in range(bucket_count))],
            deadline=Deadline.after(TIMEOUT_S),
        )
        keeper_end, trainer_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        keeper_side = Channel(keeper_end, outgoing=DAEMON_TO_CLIENT, incoming=CLIENT_TO_DAEMON)
        held.callback(keeper_side.close)
        daemon = Channel(trainer_end, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
        staged = Staged(
            generation=GENERATION, base_version=BASE_VERSION, bucket_nbytes=bucket_nbytes, bucket_count=bucket_count
        )
        trainer = RankPush.of(
            Place(Path("/run/weightcached"), "default", "host-tp0of1"),
            daemon,
            staged,
            OwnedFds([os.dup(ours.fileno()), *(os.dup(buckets[number]) for number in range(bucket_count))]),
            deadline=Deadline.after(TIMEOUT_S),
        )
        ours.close()
        with closing(trainer):
            yield Pushing(running, trainer, segment, planned, keeper_side)
