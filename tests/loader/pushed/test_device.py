"""What is pushed into a device's memory lies there as in a host's, on a driver that copies as late as a device may."""

from __future__ import annotations

import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.loader.pushed.test_pushing import LLAMA, other_values
from tests.support import device_memory as memory
from tests.support.checkpoints import tiny_llama
from tests.support.execution import load
from tests.support.host_pointers import HostPointers
from tests.support.plain import tensors_of
from tests.support.resources import nothing_left_behind
from tests.support.workers import GENERATION, TIMEOUT_S
from weightcached.client.publish.rank import RankPush
from weightcached.client.publish.values import Given
from weightcached.daemon.buckets import make_bucket
from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.device import DeviceSegments, Span
from weightcached.loader.pushed.serve import Received, Trainer
from weightcached.loader.pushed.wanted import pushables
from weightcached.protocol.channel import Channel
from weightcached.protocol.config import build_config
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Staged
from weightcached.protocol.places import Place

BUCKET_NBYTES = 64 * 1024


@pytest.mark.parametrize("segment_max_nbytes", [None, 40 << 10], ids=["one segment", "several"])
@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"quantization": "fp8-tensor"}], ids=str)
def test_every_byte_is_that_of_a_load_into_host_memory(
    tmp_path: Path, cuda_here: object, options: dict[str, Any], on: str, segment_max_nbytes: int | None
) -> None:
    """``on``: where values are converted."""
    served, trained = tiny_llama(tmp_path / "served", **LLAMA), other_values(tmp_path / "trained", **LLAMA)
    chosen: dict[str, Any] = {"layout": "fused", "tp_size": 2, "tp_rank": 1, **options}
    expected = load(trained, **chosen)
    with open_checkpoint(served) as checkpoint:
        config = build_config(served, **chosen)
        placement = pipeline.prepare(checkpoint, config, segment_max_nbytes=segment_max_nbytes).placement
        table = pushables(placement, checkpoint.tensors)
    assert (len(placement.segments_nbytes) > 1) == (segment_max_nbytes is not None)
    computing = HostPointers() if on == "device" else None
    with nothing_left_behind(), ExitStack() as held, OwnedFds() as buckets:
        mapped = [held.enter_context(memory.mapped(None, nbytes)) for nbytes in placement.segments_nbytes]
        for one in mapped:
            memory.write(one.address, b"\xa5" * one.nbytes)
        buckets.extend([make_bucket(BUCKET_NBYTES), make_bucket(BUCKET_NBYTES)])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

        def work() -> Received:
            with closing(Trainer(theirs, table)) as trainer:
                spans = [Span(one.address, one.nbytes) for one in mapped]
                segments = DeviceSegments(mapped[0].context, spans, computing=computing)
                fds = [buckets[0], buckets[1]]
                return trainer.receive(placement, segments, fds, bucket_nbytes=BUCKET_NBYTES, base=None)

        with ThreadPoolExecutor(1) as worker:
            fds = OwnedFds([ours.detach(), os.dup(buckets[0]), os.dup(buckets[1])])
            received = pushed(fds, trained, worker.submit(work))
        found = [memory.read(one.address, one.nbytes) for one in mapped]
    assert bool(computing and computing.computed) == (on == "device" and bool(options))
    for placed in placement.placed:
        name = placed.parameter.name
        assert bytes(found[placed.segment][placed.offset : placed.offset + placed.nbytes]) == expected.data[name], name
        assert received.executed.digests[name] == expected.rows[name].digest, name


def pushed(fds: OwnedFds, trained: Path, outcome: Future[Received]) -> Received:
    """Push everything, and wait for the worker: a trainer that goes away before has failed."""
    here, nobody = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    daemon = Channel(here, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
    staged = Staged(generation=GENERATION, base_version="before", bucket_nbytes=BUCKET_NBYTES, bucket_count=2)
    place = Place(Path("/run/weightcached"), "default", "host-tp1of2")
    with nobody, closing(RankPush.of(place, daemon, staged, fds, deadline=Deadline.after(TIMEOUT_S))) as push:
        for name, tensor in tensors_of(trained).items():
            whole = tuple(slice(0, extent) for extent in tensor.shape)
            for box in push.boxes(name):
                push.push(name, Given(push.table[name], tensor, whole), box)
        push.finish()
        return outcome.result(TIMEOUT_S)
