"""Rows about filling: what lands on the device is the checkpoint, and it lands at the rate of the machine's bus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import xxhash

from tests.benchmarks.checkpoints import dense_decoder
from tests.gpu.row import GIB, MIB, Row, Setting, Skipped, folder_of, in_words, require, torch_computes, torch_with_cuda
from tests.support import device_memory as memory
from tests.support.checkpoints import tiny_llama
from weightcached.loader import pipeline
from weightcached.loader.bench import Computing
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.computing import computing_on
from weightcached.loader.device import COMPUTING_NBYTES, DeviceSegments, Span
from weightcached.loader.execute import execute
from weightcached.loader.gds import probed
from weightcached.loader.strategy import WAITING_THREADS
from weightcached.protocol.config import build_config
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host
from weightcached.protocol.memory.cuda import devices, nvml
from weightcached.protocol.memory.cuda.context import Stream
from weightcached.protocol.memory.cuda.staging import Pinned

COMPUTED: tuple[dict[str, object], ...] = (
    {"layout": "fused", "tp_size": 1, "tp_rank": 0, "quantization": "fp8"},
    {"layout": "fused", "tp_size": 2, "tp_rank": 1, "quantization": "fp8-tensor"},
    {"layout": "fused", "tp_size": 1, "tp_rank": 0, "quantization": "fp8-block"},
    {"layout": "fused", "tp_size": 2, "tp_rank": 0, "quantization": "int8"},
    {"layout": "fused", "tp_size": 1, "tp_rank": 0, "quantization": "int4=64"},
    {"layout": "fused", "tp_size": 2, "tp_rank": 1, "quantization": "int4-asym=64"},
    {"layout": "fused", "tp_size": 1, "tp_rank": 0, "dtype": "float32"},
)
"""Every online method, and a cast; fp8 by channel first, whose peak of memory is looked at."""
WAYS: tuple[dict[str, object], ...] = (
    {"layout": "hf", "tp_size": 1, "tp_rank": 0},
    {"layout": "fused", "tp_size": 2, "tp_rank": 1},
    {"layout": "fused", "tp_size": 1, "tp_rank": 0, "dtype": "float32"},
    {"layout": "fused", "tp_size": 1, "tp_rank": 0, "quantization": "fp8-tensor"},
    {"layout": "fused", "tp_size": 2, "tp_rank": 0, "quantization": "int4=64"},
)
"""Plain, strided, cast, held until measured, and with several products."""
PASSING_NBYTES = 2 * MIB * WAITING_THREADS
"""What torch's allocator takes of a device for fp8's arithmetic: one piece of its smallest size for each thread's
stream."""
TARGET_SHARE = 0.8
HALF_GIB = GIB // 2
PIECE_NBYTES = 64 * MIB


def digests(setting: Setting) -> str:
    """Every row's bytes on the device, read back, against its digest, against the same load into host memory, and for
    layout ``hf`` against the file's own bytes.
    """
    directory = decoder(setting)
    rows = nbytes = 0
    for way in WAYS:
        rows_here, nbytes_here = _compared(setting, directory, way)
        rows, nbytes = rows + rows_here, nbytes + nbytes_here
    return f"{rows} rows, {nbytes / MIB:.0f} MiB, {len(WAYS)} ways: plain, strided, cast, two quantizations"


def _compared(
    setting: Setting, directory: Path, way: dict[str, object], computing: Computing | None = None
) -> tuple[int, int]:
    config = build_config(directory, **way)  # type: ignore[arg-type]
    with open_checkpoint(directory) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config)
        nbytes = prepared.placement.nbytes
        with memory.mapped(setting.uuid, nbytes) as mapped:
            segment = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)], computing=computing)
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


def arithmetic(setting: Setting) -> str:
    """What the device computes is what the host computes, byte for byte; and what that takes of the device."""
    directory = decoder(setting)
    computing = _computing(setting)
    rows = 0
    for way in COMPUTED:
        rows += _compared(setting, directory, way, computing)[0]
    return f"{rows} rows, {len(COMPUTED)} ways, equal on both; {_peak(setting, directory, computing)}"


def _computing(setting: Setting) -> Computing:
    """The device's; in a rehearsal, the host's processors over the same addresses."""
    if not torch_computes(setting):
        from tests.support.host_pointers import HostPointers

        return HostPointers()
    torch_with_cuda()
    computing, why = computing_on(devices.find(setting.uuid))
    require(computing is not None, why)
    assert computing is not None
    return computing


def _peak(setting: Setting, directory: Path, computing: Computing) -> str:
    """The most that was in use during a load, beyond the segment. After a first load, so that the context, torch's
    kernels and what else stays for good is there already.
    """
    config = build_config(directory, **COMPUTED[0])  # type: ignore[arg-type]
    with open_checkpoint(directory) as checkpoint:
        placement = pipeline.prepare(checkpoint, config).placement
        with memory.mapped(setting.uuid, placement.nbytes) as mapped:
            used: list[int] = []

            def load(progress: Callable[[int, int], None] | None = None) -> None:
                segments = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)], computing=computing)
                execute(placement, checkpoint.files, segments, progress=progress)

            load()
            if torch_computes(setting):
                import torch

                torch.cuda.empty_cache()
            before = nvml.memory(setting.uuid).used_nbytes
            load(lambda _done, _total: used.append(nvml.memory(setting.uuid).used_nbytes))
    extra, bound = max(used) - before, COMPUTING_NBYTES + PASSING_NBYTES + setting.spare_nbytes
    figures = f"at most {extra / MIB:.0f} MiB beside the shard (bound {bound / MIB:.0f} MiB)"
    require(extra <= bound, figures)
    return figures


def straight(setting: Setting) -> str:
    """The same bytes by GPUDirect Storage, and how fast; nothing of the files is left in the page cache to help."""
    directory = decoder(setting, 4 * GIB)
    config = build_config(directory, layout="fused", tp_size=1, tp_rank=0)
    with open_checkpoint(directory) as checkpoint:
        placement = pipeline.prepare(checkpoint, config).placement
        with memory.mapped(setting.uuid, placement.nbytes) as mapped:
            way, why = probed(checkpoint.files, mapped.context)
            if way is None:
                raise Skipped(why)
            way.close()
            seconds = {}
            for strategy in ("direct", "gds"):
                memory.write(mapped.address, bytes(min(mapped.nbytes, MIB)))
                started_s = time.perf_counter()
                executed = execute(
                    placement,
                    checkpoint.files,
                    DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)]),
                    strategy=strategy,
                )
                seconds[strategy] = time.perf_counter() - started_s
                for placed in placement.placed:
                    found = memory.read(mapped.address + placed.offset, placed.nbytes)
                    wanted = executed.digests[placed.parameter.name]
                    require(xxhash.xxh3_128(found).digest() == wanted, f"{strategy}: {placed.parameter.name} differs")
    return "; ".join(f"{name} {placement.nbytes / one / 1e9:.1f} GB/s" for name, one in seconds.items())


def rates(setting: Setting) -> str:
    """Pinned memory → device as fast as copies go, and a load from the page cache beside it, as a worker loads; with
    other numbers of threads, it shows whether ours is a good one. The same load into memory of the host shows whether
    reading and digesting or the copies set the pace: what overlaps takes as long as the slower of both, and not their
    sum. A load also allocates and pins its staging, which copies alone have done before: that is measured by itself.
    Best of three.
    """
    directory = decoder(setting, 4 * GIB)
    for path in directory.glob("*.safetensors"):
        _read_through(path)
    config = build_config(directory, layout="fused", tp_size=1, tp_rank=0)
    figures = []
    with open_checkpoint(directory) as checkpoint:
        placement = pipeline.prepare(checkpoint, config).placement
        nbytes = placement.nbytes
        with memory.mapped(setting.uuid, nbytes) as mapped:
            figures.append(_pinning(min(PIECE_NBYTES, nbytes)))
            with Pinned(min(PIECE_NBYTES, nbytes)) as pinned:
                limit = nbytes / _best(lambda: _copy_over(pinned, mapped.address, nbytes))
            figures.append(f"copies out of pinned memory {limit / 1e9:.1f} GB/s")
            loads: dict[int | None, float] = {}
            for threads in (None, 2, 4, 8, 16):
                segments: list[DeviceSegments] = []

                def load(threads: int | None = threads, segments: list[DeviceSegments] = segments) -> None:
                    segments.append(DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)]))
                    execute(placement, checkpoint.files, segments[-1], threads=threads)

                loads[threads] = nbytes / _best(load)
                how = "load from the page cache" if threads is None else f"with {threads} threads"
                figures.append(f"{how} {loads[threads] / 1e9:.1f} GB/s ({segments[-1]})")
        with OwnedFds([host.allocate(nbytes, name="check")]) as fds:
            seconds = _best(lambda: execute(placement, checkpoint.files, list(fds)))
        figures.append(f"the same into host memory {nbytes / seconds / 1e9:.1f} GB/s")
    claim = f"the load reaches {loads[None] / limit:.2f} of the rate of copies (target {TARGET_SHARE})"
    return setting.judged(figures, {claim: loads[None] >= TARGET_SHARE * limit})


def _pinning(nbytes: int) -> str:
    """What pinned memory costs before the first copy, and when it is given back."""
    made, given_back = [], []
    for _ in range(3):
        started_s = time.perf_counter()
        pinned = Pinned(nbytes)
        made.append(time.perf_counter() - started_s)
        pinned.close()
        given_back.append(time.perf_counter() - started_s - made[-1])
    return (
        f"allocating and pinning {in_words(nbytes)} {min(made) * 1e3:.2f} ms ({nbytes / min(made) / 1e9:.1f} GB/s), "
        f"giving it back {min(given_back) * 1e3:.2f} ms"
    )


def decoder(setting: Setting, nbytes: int = HALF_GIB) -> Path:
    """A Llama of that size, which rows of one run share: writing it takes seconds."""
    folder = Path(setting.folder) / f"decoder-{nbytes / GIB:g}-GiB"
    if not folder.exists():  # renamed when it is complete: the row that writes it may be killed
        unfinished = folder_of(setting, "unfinished") / "model"
        if setting.rehearsal:
            tiny_llama(unfinished, hidden_size=256, head_dim=64, intermediate_size=512, vocab_size=4096)
        else:
            dense_decoder(unfinished, nbytes=nbytes, files=2)
        unfinished.rename(folder)
    return folder


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
    Row("arithmetic", "what the device computes is what the host computes, within a bound of memory", arithmetic, 120),
    Row("straight", "GPUDirect Storage brings the same bytes, past the host's memory", straight, 120),
    Row("rates", "a load from the page cache reaches the rate of copies from pinned memory", rates, 120),
)
