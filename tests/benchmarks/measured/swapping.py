"""Swaps: one generation in the place of another, of 1,000 tensors, with threads that compute behind the barrier."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import tiny_llama
from weightcached.client import WeightSet, attach
from weightcached.protocol.config import CacheConfig, Provenance, build_config
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import ManifestMeta, NameAccounting, Row, align, encode_manifest
from weightcached.protocol.memory import host
from weightcached.protocol.messages import AccountingCounts, Grant, SegmentInfo
from weightcached.protocol.places import Place, host_device
from weightcached.protocol.testing import AnswerSwitches, HonestGrant, LyingDaemon, Receive, Step, sealed_memory

_READERS = 2


def swaps(folder: str, *, nbytes: int, tensors: int, rounds: int) -> dict[str, Any]:
    """Seconds of each swap between two generations, without readers and with two threads that read through the barrier.

    The daemon is a thread of this process: what is measured begins when descriptors are here.
    """
    model = tiny_llama(Path(folder) / "swapped")
    config = build_config(model, layout="hf", tp_size=1, tp_rank=0)
    place = Place(Path(folder) / "run", "default", host_device(tp_size=1, tp_rank=0))
    place.directory.mkdir(parents=True, mode=0o755)
    place.runtime_dir.chmod(0o755)
    with _generation(config, "1", nbytes, tensors) as first, _generation(config, "2", nbytes, tensors) as second:
        script: list[Step] = [Receive(), first.step(), AnswerSwitches([first, second])]
        with (
            LyingDaemon(place.socket_path, script, timeout_s=3600),
            attach(model, runtime_dir=place.runtime_dir, mode="require", heartbeat_s=600) as weights,
        ):
            for value in weights.values():
                value.flatten()[:1].sum()
            weights.populate()
            quiet = _swapped(weights, [second, first], rounds)
            with _reading(weights):
                busy = _swapped(weights, [second, first], rounds)
    return {"quiet": quiet, "busy": busy}


def _swapped(weights: WeightSet, generations: list[HonestGrant], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in ("populate", "waited", "barrier", "processor")}
    for number in range(rounds):
        generation = generations[number % 2].message.generation
        with weights.stage(generation=generation, timeout_s=600) as staged, weights.barrier.stopped() as stopped:
            began_s = time.thread_time()
            done = staged.swap(stopped)
            processor_s = time.thread_time() - began_s
        assert stopped.seconds is not None
        assert weights.generation == generation
        for name, value in (
            ("populate", done.populate_s),
            ("waited", stopped.waited_s),
            ("barrier", stopped.seconds),
            ("processor", processor_s),
        ):
            seconds[name].append(value)
    return seconds


@contextmanager
def _reading(weights: WeightSet) -> Iterator[None]:
    over = threading.Event()
    views = [weights[name] for name in list(weights)[:: max(len(weights) // 50, 1)]]

    def read() -> None:
        while not over.is_set():
            for view in views:
                with weights.barrier.reading():
                    torch.sum(view[:4096], dtype=torch.int64)

    threads = [threading.Thread(target=read) for _ in range(_READERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def _generation(config: CacheConfig, number: str, nbytes: int, tensors: int) -> Iterator[HonestGrant]:
    """A generation whose every page is there. What is in it is nobody's concern."""
    each = align(nbytes // tensors)
    rows = [
        Row(f"layers.{index}.weight", 0, index * each, each, (each,), (1,), "uint8", bytes(16))
        for index in range(tensors)
    ]
    total = each * tensors
    meta = ManifestMeta(
        generation=number * 32,
        version=f"receipts:{number * 64}",
        receipts_version=f"receipts:{number * 64}",
        fingerprint=config.fingerprint,
        config=config.model_dump(),
        digest=None,
        segments_nbytes=(total,),
        bytes_read=0,
        bytes_kept=0,
        seconds={},
    )
    manifest = encode_manifest(meta, rows, NameAccounting())
    with (
        OwnedFds([sealed_memory(manifest)]) as first,
        OwnedFds([host.allocate(total, name="weightcached:b")]) as segment,
    ):
        os.posix_fallocate(segment[0], 0, total)
        host.seal(segment[0])
        segment.append(host.export(segment[0]))
        message = Grant(
            generation=meta.generation,
            version=meta.version,
            receipts_version=meta.receipts_version,
            nonce="0" * 32,
            manifest_sha256=hashlib.sha256(manifest).hexdigest(),
            manifest_nbytes=len(manifest),
            segments=(SegmentInfo(memory="host", nbytes=total),),
            resident_nbytes=total,
            accounting=AccountingCounts(expected=0, loaded=0, ignored=0, unexpected=0),
            digest=None,
            provenance=Provenance(path="/nowhere", host="nowhere"),
        )
        yield HonestGrant(message, manifest, b"", (first[0], segment[1]))
