"""Rows about filling: what lands on the device is the checkpoint, and it lands at the rate of the machine's bus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import xxhash

from tests.benchmarks.checkpoints import dense_decoder
from tests.gpu.row import GIB, MIB, Row, Setting, folder_of, require
from tests.support import device_memory as memory
from tests.support.checkpoints import tiny_llama
from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.device import DeviceSegments, Span
from weightcached.loader.execute import execute
from weightcached.protocol.config import build_config
from weightcached.protocol.memory import host
from weightcached.protocol.memory.cuda.context import Stream
from weightcached.protocol.memory.cuda.staging import Pinned

WAYS: tuple[dict[str, object], ...] = (
    {"layout": "hf", "tp_size": 1, "tp_rank": 0},
    {"layout": "fused", "tp_size": 2, "tp_rank": 1},
    {"layout": "fused", "tp_size": 1, "tp_rank": 0, "dtype": "float32"},
    {"layout": "fused", "tp_size": 1, "tp_rank": 0, "quantization": "fp8-tensor"},
    {"layout": "fused", "tp_size": 2, "tp_rank": 0, "quantization": "int4=64"},
)
"""Plain, strided, cast, held until measured, and with several products."""
TARGET_SHARE = 0.8
PIECE_NBYTES = 64 * MIB


def digests(setting: Setting) -> str:
    """Every row's bytes on the device, read back, against its digest, against the same load into host memory, and for
    layout ``hf`` against the file's own bytes.
    """
    directory = decoder(setting, "bytes", GIB)
    rows = nbytes = 0
    for way in WAYS:
        rows_here, nbytes_here = _compared(setting, directory, way)
        rows, nbytes = rows + rows_here, nbytes + nbytes_here
    return f"{rows} rows, {nbytes / MIB:.0f} MiB, {len(WAYS)} ways: plain, strided, cast, two quantizations"


def _compared(setting: Setting, directory: Path, way: dict[str, object]) -> tuple[int, int]:
    config = build_config(directory, **way)  # type: ignore[arg-type]
    with open_checkpoint(directory) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config)
        nbytes = prepared.placement.nbytes
        with memory.mapped(setting.uuid, nbytes) as mapped:
            segment = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)])
            loaded = pipeline.load(checkpoint, prepared, segment)
            found = memory.read(mapped.address, nbytes)
        fd = host.allocate(nbytes, name="check")
        try:
            pipeline.load(checkpoint, prepared, fd)
            with closing(host.map_readonly(fd, nbytes=nbytes)) as mapping:
                require(mapping.view() == found, f"{way}: the device's bytes are not those of a host's load")
        finally:
            os.close(fd)
        for row in loaded.rows:
            data = found[row.offset : row.offset + row.nbytes]
            require(xxhash.xxh3_128(data).digest() == row.digest, f"{way}: {row.name} is not what was digested")
            if config.layout == "hf":
                tensor = checkpoint.tensors[row.name]
                on_disk = os.pread(checkpoint.files[tensor.file], tensor.nbytes, tensor.offset)
                require(on_disk == data, f"{row.name} has other bytes than its file")
    return len(loaded.rows), nbytes


def rates(setting: Setting) -> str:
    """Pinned memory → device as fast as copies go, and a load from the page cache beside it. Best of three."""
    directory = decoder(setting, "rates", 4 * GIB)
    for path in directory.glob("*.safetensors"):
        _read_through(path)
    config = build_config(directory, layout="fused", tp_size=1, tp_rank=0)
    figures = []
    with open_checkpoint(directory) as checkpoint:
        placement = pipeline.prepare(checkpoint, config).placement
        nbytes = placement.nbytes
        with memory.mapped(setting.uuid, nbytes) as mapped:
            with Pinned(min(PIECE_NBYTES, nbytes)) as pinned:
                limit = nbytes / _best(lambda: _copy_over(pinned, mapped.address, nbytes))
            figures.append(f"pinned memory to device {limit / 1e9:.1f} GB/s")
            best = 0.0
            for threads in (2, 4, 8, 16):
                seconds = _best(
                    lambda threads=threads: execute(  # type: ignore[misc]
                        placement,
                        checkpoint.files,
                        DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)]),
                        threads=threads,
                    )
                )
                figures.append(f"load with {threads} threads {nbytes / seconds / 1e9:.1f} GB/s")
                best = max(best, nbytes / seconds)
    claim = f"{best / limit:.2f} of the limit (target {TARGET_SHARE})"
    figures.append(setting.judge(best >= TARGET_SHARE * limit, claim))
    return "; ".join(figures)


def decoder(setting: Setting, name: str, nbytes: int) -> Path:
    folder = folder_of(setting, name) / "model"
    if setting.rehearsal:
        return tiny_llama(folder, hidden_size=256, head_dim=64, intermediate_size=512, vocab_size=4096)
    return dense_decoder(folder, nbytes=nbytes, files=2).directory


def _copy_over(pinned: Pinned, address: int, nbytes: int) -> None:
    """``nbytes`` to the device out of one piece, over and over, on two streams: only the bus is in the way."""
    streams = [Stream(), Stream()]
    try:
        for number, start in enumerate(range(0, nbytes, pinned.nbytes)):
            some = min(pinned.nbytes, nbytes - start)
            streams[number % 2].copy_in(address + start, pinned.address, some)
    finally:
        for stream in streams:
            stream.synchronize()
            stream.close()


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of three."""
    seconds = []
    for _ in range(3):
        started_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)


def _read_through(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(16 * MIB):
            pass


ROWS = (
    Row("bytes", "bytes on the device are the checkpoint's, whatever was done with them", digests, 90),
    Row("rates", "a load from the page cache reaches the rate of copies from pinned memory", rates, 120),
)
