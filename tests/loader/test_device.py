"""Filling a device's segment, against a driver that copies as late as a device may: a room used again too early, or
digested other than it was copied, shows in the bytes.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
from contextlib import suppress

import pytest
import xxhash

from tests.support import device_memory as memory
from tests.support import expert_models
from tests.support.checkpoints import RawTensor, make_checkpoint, raw_tensor, tiny_llama, write_checkpoint
from tests.support.execution import segment_of
from tests.support.fakecuda import CONTEXT_NBYTES, GIVING_BACK, OUT_OF_MEMORY, UNKNOWN
from tests.support.host_pointers import HostPointers
from tests.support.resources import nothing_left_behind, quick_collections
from weightcached.loader import computing, device, pipeline
from weightcached.loader.boxes import Box, whole
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.computing import computing_on
from weightcached.loader.device import ROOMS, DeviceSegments, Span
from weightcached.loader.execute import execute
from weightcached.loader.filling import to_be_filled
from weightcached.loader.layout import Placed, Placement
from weightcached.loader.planned import Copy, PlannedParameter
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import DeviceFailed, InsufficientMemory, TruncatedFile, UnusableValue
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.cuda import devices, driver
from weightcached.protocol.memory.cuda.context import Stream
from weightcached.protocol.memory.cuda_ipc import CudaIpc
from weightcached.protocol.memory.cuda_vmm import CudaVmm


def filled(placement, files, *, computing=None, **options):
    """Execute into memory of the device that was full of something else; (executed, all of its bytes)."""
    with memory.mapped(None, placement.nbytes) as mapped:
        memory.write(mapped.address, b"\xa5" * mapped.nbytes)
        segment = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)], computing=computing)
        executed = execute(placement, files, segment, **options)
        return executed, memory.read(mapped.address, mapped.nbytes)


def on_host(placement, files, **options):
    """The same in host memory, which nobody has written to."""
    with segment_of(placement.nbytes, filled_with=b"\0") as segment:
        executed = execute(placement, files, segment, **options)
        with open(f"/proc/self/fd/{segment}", "rb", buffering=0) as file:
            return executed, file.read()


def same_on_both(placement, files, *, computing=None, **options):
    """Every byte and digest of the device's segment is the host's; gaps and the rest of its last page are zeros."""
    executed, found = filled(placement, files, computing=computing, **options)
    wanted_executed, wanted = on_host(placement, files, **options)
    assert found[: len(wanted)] == wanted
    assert not any(found[len(wanted) :])
    assert executed.digests == wanted_executed.digests
    assert executed.traffic == wanted_executed.traffic
    for placed in placement.placed:
        data = found[placed.offset : placed.offset + placed.nbytes]
        assert executed.digests[placed.parameter.name] == xxhash.xxh3_128(data).digest()


METHODS = ["fp8", "fp8-tensor", "fp8-block=8x8", "int8", "int4=8", "int4-asym=8"]
WAYS = [
    {"layout": "hf"},
    {"tp_size": 2, "tp_rank": 1},
    {"dtype": "float16"},
    {"dtype": "float32"},
    {"quantization": "fp8"},
    {"quantization": "fp8-tensor"},
    {"quantization": "fp8-block=8x8", "tp_size": 2, "tp_rank": 0},
    {"quantization": "int8"},
    {"quantization": "int4=8", "tp_size": 2, "tp_rank": 1},
    {"quantization": "int4-asym=8"},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize(("slab_nbytes", "threads"), [(8 << 20, 2), (1000, 4), (300, 1)])
def test_every_byte_and_digest_is_that_of_a_load_into_host_memory(tmp_path, cuda_here, options, slab_nbytes, threads):
    """Plain, strided, cast, quantized slab by slab and held until measured; slabs few and many, rings used again."""
    directory = tiny_llama(tmp_path, intermediate_size=80, tie_word_embeddings=True)
    config = build_config(directory, **{"layout": "fused", "tp_size": 1, "tp_rank": 0} | options)
    with nothing_left_behind(), open_checkpoint(directory) as checkpoint:
        placement = pipeline.prepare(checkpoint, config).placement
        same_on_both(placement, checkpoint.files, slab_nbytes=slab_nbytes, threads=threads)


COMPUTED = [
    {"dtype": "float32"},
    *({"quantization": method, "tp_size": size, "tp_rank": size - 1} for method in METHODS for size in (1, 2)),
]


@pytest.mark.parametrize("options", COMPUTED, ids=str)
@pytest.mark.parametrize(("slab_nbytes", "threads"), [(8 << 20, 2), (300, 3)])
def test_what_the_device_computes_is_what_the_host_computes(tmp_path, cuda_here, options, slab_nbytes, threads):
    """Every online method, and a cast: values are brought as the files have them, and computed where they stay."""
    directory = tiny_llama(tmp_path, intermediate_size=80, tie_word_embeddings=True)
    config = build_config(directory, **{"layout": "fused", "tp_size": 1, "tp_rank": 0} | options)
    computing = HostPointers()
    with nothing_left_behind(), open_checkpoint(directory) as checkpoint:
        placement = pipeline.prepare(checkpoint, config).placement
        same_on_both(placement, checkpoint.files, slab_nbytes=slab_nbytes, threads=threads, computing=computing)
    assert computing.computed > 4


@pytest.mark.parametrize("quantization", ["fp8", "fp8-tensor", "int4=8"])
def test_the_device_computes_matrices_that_are_larger_than_a_room(tmp_path, cuda_here, quantization):
    """They are transposed while they are read, so none is cut: scratch memory and what is fetched are as large."""
    directory = expert_models.write(tmp_path, expert_models.config_of("gpt_oss", num_hidden_layers=1))
    wanted = build_config(directory, layout="fused", tp_size=1, tp_rank=0, quantization=quantization)
    computing = HostPointers()
    with nothing_left_behind(), open_checkpoint(directory) as checkpoint:
        placement = pipeline.prepare(checkpoint, wanted).placement
        same_on_both(placement, checkpoint.files, slab_nbytes=512, threads=3, computing=computing)
    assert computing.computed > 4


@pytest.mark.parametrize("options", [{"tp_size": 2, "tp_rank": 1}, {"quantization": "int4=8"}, {"transposed": True}])
def test_a_device_that_computes_holds_the_segment_and_two_slabs_of_each_thread(tmp_path, cuda_here, options):
    """Strided or not, and whatever is made of the values; of transposed matrices the largest one instead of a slab."""
    slab_nbytes, threads, wanted = 64 << 10, 3, {"tp_size": 1, "tp_rank": 0, "quantization": "fp8"} | options
    if wanted.pop("transposed", False):
        directory = expert_models.write(tmp_path, expert_models.config_of("gpt_oss", num_hidden_layers=1))
        slab_nbytes = 512
    else:
        directory = tiny_llama(tmp_path, hidden_size=256, vocab_size=512, intermediate_size=2048)
    config = build_config(directory, layout="fused", **wanted)
    with open_checkpoint(directory) as checkpoint:
        placement = pipeline.prepare(checkpoint, config).placement
        computed = [one.parameter for one in placement.placed if one.parameter.transform is not None]
        whole_matrix = max(math.prod(one.source_shape[-2:]) for one in computed)
        uncut = 6 * whole_matrix if any(copy.transposed for one in computed for copy in one.copies) else 0
        with memory.mapped(None, placement.nbytes) as mapped:
            segment = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)], computing=HostPointers())
            cuda_here.fake.peak_nbytes()
            execute(placement, checkpoint.files, segment, slab_nbytes=slab_nbytes, threads=threads)
            beside = cuda_here.fake.peak_nbytes() - mapped.nbytes - CONTEXT_NBYTES
            assert 0 < beside <= threads * max(2 * slab_nbytes, uncut)
            assert cuda_here.fake.used_nbytes() == mapped.nbytes


@pytest.mark.parametrize(
    ("call", "nth", "error"),
    [
        ("cuMemAlloc", 2, InsufficientMemory),
        ("cuMemHostAlloc", 1, InsufficientMemory),
        ("cuMemcpyHtoDAsync", 2, DeviceFailed),
        ("cuMemcpyDtoHAsync", 3, DeviceFailed),
        ("cuStreamSynchronize", 4, DeviceFailed),
    ],
)
def test_a_device_that_fails_while_it_computes_leaves_nothing(tmp_path, cuda_here, call, nth, error):
    directory = tiny_llama(tmp_path)
    config = build_config(directory, layout="fused", tp_size=1, tp_rank=0, quantization="int4=8")
    result = OUT_OF_MEMORY if error is InsufficientMemory else UNKNOWN
    with open_checkpoint(directory) as checkpoint:
        placement = pipeline.prepare(checkpoint, config).placement
        with nothing_left_behind(), memory.mapped(None, placement.nbytes) as mapped:
            segment = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)], computing=HostPointers())
            cuda_here.fake.fail((call, cuda_here.fake.calls().count(call) + nth, result))
            with pytest.raises(error):
                execute(placement, checkpoint.files, segment, slab_nbytes=1000, threads=3)
            cuda_here.fake.fail()
            assert cuda_here.fake.used_nbytes() == mapped.nbytes


def test_what_the_device_cannot_quantize_is_refused_by_name(tmp_path, cuda_here):
    directory = tiny_llama(tmp_path, hidden_size=64)
    config = build_config(directory, layout="fused", tp_size=1, tp_rank=0, quantization="int8")
    with open_checkpoint(directory) as checkpoint:
        tensor = next(one for name, one in checkpoint.tensors.items() if name.endswith("o_proj.weight"))
        with open(directory / "model.safetensors", "r+b") as file:
            file.seek(tensor.offset)
            file.write(b"\x80\x7f")  # infinity
        placement = pipeline.prepare(checkpoint, config).placement
        with nothing_left_behind(), pytest.raises(UnusableValue, match="o_proj"):
            filled(placement, checkpoint.files, slab_nbytes=300, threads=4, computing=HostPointers())


def test_without_cuda_the_host_computes_and_says_why(cuda_here):
    computing, why = computing_on(devices.find(None))
    assert computing is None
    assert "has no CUDA" in why


@pytest.mark.parametrize("case", ["mixtral", "phi3"])
def test_stacked_experts_and_fused_parts_are_the_same_on_both(tmp_path, cuda_here, case):
    directory = make_checkpoint(tmp_path / case, case)
    config = build_config(directory, layout="fused", tp_size=2, tp_rank=1)
    with open_checkpoint(directory) as checkpoint:
        same_on_both(pipeline.prepare(checkpoint, config).placement, checkpoint.files, slab_nbytes=700, threads=3)


@pytest.mark.parametrize("quantization", ["none", "fp8-tensor", "int4=8"])
def test_transposed_matrices_that_are_larger_than_a_room_go_piece_by_piece(tmp_path, cuda_here, quantization):
    """A matrix that is transposed is one slab, however large: it is read elsewhere and written through one room."""
    config = expert_models.config_of("gpt_oss", num_hidden_layers=1)
    directory = expert_models.write(tmp_path, config)
    wanted = build_config(directory, layout="fused", tp_size=1, tp_rank=0, quantization=quantization)
    with open_checkpoint(directory) as checkpoint:
        same_on_both(pipeline.prepare(checkpoint, wanted).placement, checkpoint.files, slab_nbytes=512, threads=3)


def test_scalars_empty_tensors_and_all_padding(tmp_path, cuda_here):
    tensors = {"s": raw_tensor("s", (), "F32"), "e": RawTensor("F32", (0, 3), b"")}
    directory = write_checkpoint(tmp_path, {"architectures": ["Any"]}, {"model.safetensors": tensors})
    with open_checkpoint(directory) as checkpoint:
        made = (
            PlannedParameter("s", (), "float32", "float32", (Copy(checkpoint.tensors["s"], whole(()), whole(())),)),
            PlannedParameter("e", (0, 3), "float32", None, ()),
            PlannedParameter("z", (700, 5), "int64", None, (), zeros=(Box((0, 0), (700, 5)),)),
        )
        placement = Placement(
            (Placed(made[0], 0, 0, 4), Placed(made[1], 0, 256, 0), Placed(made[2], 0, 256, 28000)), (28416,)
        )
        same_on_both(placement, checkpoint.files, slab_nbytes=4096)


@pytest.fixture
def opened(tmp_path):
    """(checkpoint, placement) of some MiB, so that there are several slabs and threads."""
    directory = tiny_llama(tmp_path, hidden_size=256, vocab_size=8192)
    with open_checkpoint(directory) as checkpoint:
        config = build_config(directory, layout="fused", tp_size=1, tp_rank=0)
        yield checkpoint, pipeline.prepare(checkpoint, config).placement


THREADS = 3


@pytest.fixture
def all_at_work(monkeypatch):
    """Each of so many threads gives its first copy to its stream when all of them have one: none comes too late."""
    begun, together, copy_in = threading.local(), threading.Barrier(THREADS), Stream.copy_in

    def meeting(stream, *what):
        if not getattr(begun, "already", False):
            begun.already = True
            together.wait(timeout=20)
        copy_in(stream, *what)

    monkeypatch.setattr(Stream, "copy_in", meeting)


@pytest.mark.usefixtures("all_at_work")
def test_pinned_memory_is_bounded_by_the_rings_and_the_device_holds_the_segment_alone(opened, cuda_here):
    checkpoint, placement = opened
    with memory.mapped(None, placement.nbytes) as mapped:
        segment = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)])
        execute(placement, checkpoint.files, segment, slab_nbytes=64 << 10, threads=THREADS)
        assert cuda_here.fake.peak_nbytes() == mapped.nbytes + CONTEXT_NBYTES
    assert str(segment).startswith("staging: 1 MiB")  # 3 threads, 4 rooms of 64 KiB each: 0.75
    assert cuda_here.fake.calls().count("cuMemHostAlloc") <= 2 + THREADS * (ROOMS + 1)


@pytest.mark.usefixtures("all_at_work")
def test_copies_of_all_threads_are_under_way_together_and_none_is_waited_for_before_its_room_is_needed(
    opened, cuda_here
):
    """The driver does a copy when somebody waits. So nobody waits for a stream before the last copy is given, and for a
    copy's event only who takes a room for another time.
    """
    checkpoint, placement = opened
    with memory.mapped(None, placement.nbytes) as mapped:
        segment = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)])
        execute(placement, checkpoint.files, segment, slab_nbytes=64 << 10, threads=THREADS)
    calls = cuda_here.fake.calls()
    copies = [number for number, call in enumerate(calls) if call == "cuMemcpyHtoDAsync"]
    waits = [number for number, call in enumerate(calls) if call == "cuStreamSynchronize"]
    assert len(copies) > 2 * THREADS * ROOMS
    assert copies[-1] < waits[0]
    assert calls.count("cuEventSynchronize") <= len(copies) - THREADS * ROOMS
    assert calls.count("cuStreamCreate") == THREADS + 1  # and the one that zeroes


# What a load asks the driver for, and which of its calls of each kind fails.
FAILING = [
    ("cuMemHostAlloc", 1, OUT_OF_MEMORY, InsufficientMemory, "pin"),
    ("cuMemHostAlloc", 5, OUT_OF_MEMORY, InsufficientMemory, "pin"),
    ("cuMemcpyHtoDAsync", 1, UNKNOWN, DeviceFailed, "cuMemcpyHtoDAsync"),
    ("cuMemcpyHtoDAsync", 30, UNKNOWN, DeviceFailed, "cuMemcpyHtoDAsync"),
    ("cuMemsetD8Async", 1, UNKNOWN, DeviceFailed, "cuMemsetD8Async"),
    ("cuStreamCreate", 1, UNKNOWN, DeviceFailed, "cuStreamCreate"),
    ("cuStreamCreate", 3, UNKNOWN, DeviceFailed, "cuStreamCreate"),
    ("cuStreamWaitEvent", 2, UNKNOWN, DeviceFailed, "cuStreamWaitEvent"),
    ("cuEventCreate", 1, UNKNOWN, DeviceFailed, "cuEventCreate"),
    ("cuEventCreate", 6, UNKNOWN, DeviceFailed, "cuEventCreate"),
    ("cuEventRecord", 9, UNKNOWN, DeviceFailed, "cuEventRecord"),
    ("cuEventSynchronize", 3, UNKNOWN, DeviceFailed, "cuEventSynchronize"),
    ("cuStreamSynchronize", 1, UNKNOWN, DeviceFailed, "cuStreamSynchronize"),
    ("cuCtxPushCurrent", 2, UNKNOWN, DeviceFailed, "cuCtxPushCurrent"),
]


@pytest.mark.parametrize(("call", "nth", "result", "error", "word"), FAILING, ids=lambda one: str(one))
def test_a_driver_that_fails_is_an_error_by_name_and_nothing_is_left(opened, cuda_here, call, nth, result, error, word):
    """One call of one kind fails; every thread ends, all pinned memory, streams and events are given back."""
    checkpoint, placement = opened
    with nothing_left_behind(), memory.mapped(None, placement.nbytes) as mapped:
        segment = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)])
        before = cuda_here.fake.calls().count(call)
        cuda_here.fake.fail((call, before + nth, result))
        with pytest.raises(error, match=word):
            execute(placement, checkpoint.files, segment, slab_nbytes=64 << 10, threads=3)
        cuda_here.fake.fail()


@pytest.mark.parametrize("kind", [CudaVmm, CudaIpc])
def test_whichever_call_of_a_load_fails_is_told_and_nothing_is_left_but_what_is_not_taken_back(
    tmp_path, cuda_here, monkeypatch, caplog, kind
):
    """One after the other, by its number in the load, which has one thread and has the device compute."""
    monkeypatch.setattr(computing, "computing_on", lambda _: (HostPointers(), "a test's torch computes"))
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # what has lost its context has nobody to tell
    directory = tiny_llama(tmp_path, num_hidden_layers=1)
    config = build_config(directory, layout="fused", tp_size=1, tp_rank=0, quantization="fp8")
    with open_checkpoint(directory) as checkpoint, quick_collections():
        placement = pipeline.prepare(checkpoint, config).placement

        def load() -> tuple[list[str], str]:
            """Which calls were made, and what is said."""
            cuda_here.reset()
            driver.initialise.cache_clear()
            caplog.clear()
            before, on = len(cuda_here.fake.calls()), kind(cuda_here.fake.devices[0].uuid)
            sizes, said = placement.segments_nbytes, ""
            try:
                with OwnedFds([on.allocate(sizes[0], name="test")]) as fds:
                    with to_be_filled(list(fds), on, nbytes=sizes, computes=True) as target:
                        execute(placement, checkpoint.files, target, slab_nbytes=4096, threads=1)
                    del target
            except DeviceFailed as error:
                said = str(error)
            made = cuda_here.fake.calls()[before:]
            gc.collect()
            return made, said + caplog.text

        calls, said = load()
        assert "failed" not in said
        for number in range(len(calls)):
            cuda_here.fake.fail(("*", number + 1, UNKNOWN))
            made, said = load()
            cuda_here.fake.fail()
            assert f"{made[number]} failed" in said, (number, said)
            # Without its context nothing is given back: that goes with the process.
            kept = made[number] in {"cuCtxPushCurrent", *GIVING_BACK}
            assert cuda_here.live() == "" or kept, (number, made[number])
    cuda_here.reset()


def test_a_device_that_is_lost_is_reported_once_and_every_thread_ends(opened, cuda_here, caplog):
    """A fault in a copy loses the context, and with it every call: the first failure is the one that is raised."""
    checkpoint, placement = opened
    threads = threading.active_count()
    with memory.mapped(None, placement.nbytes) as mapped:
        fd = mapped.allocation.export()
    # A lost context takes nothing back in order, the segment's own either.
    with suppress(DeviceFailed), memory.mapped(None, placement.nbytes, fd=fd, writable=False) as mapped:
        segment = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)])
        with pytest.raises(DeviceFailed, match="ILLEGAL_ADDRESS") as caught:
            execute(placement, checkpoint.files, segment, slab_nbytes=64 << 10, threads=2)
    os.close(fd)
    cuda_here.reset()  # what the context held goes with its process
    assert "end this process" in str(caught.value)
    assert "while giving back" in caplog.text
    assert threading.active_count() == threads


def test_a_file_that_becomes_shorter_leaves_nothing_on_the_way(opened, cuda_here):
    checkpoint, placement = opened
    last = max(checkpoint.tensors.values(), key=lambda tensor: tensor.offset)
    with open(checkpoint.directory / last.file, "r+b") as file:
        file.truncate(last.offset + last.nbytes - 1)
    with nothing_left_behind(), pytest.raises(TruncatedFile):
        filled(placement, checkpoint.files, slab_nbytes=64 << 10, threads=4)


def test_what_cannot_be_quantized_ends_threads_that_wait_for_rooms(tmp_path, cuda_here):
    directory = tiny_llama(tmp_path, hidden_size=64)
    path = directory / "model.safetensors"
    config = build_config(directory, layout="fused", tp_size=1, tp_rank=0, quantization="fp8")
    with open_checkpoint(directory) as checkpoint:
        tensor = next(one for name, one in checkpoint.tensors.items() if name.endswith("o_proj.weight"))
        with open(path, "r+b") as file:
            file.seek(tensor.offset)
            file.write(b"\x80\x7f")  # infinity
        placement = pipeline.prepare(checkpoint, config).placement
        with nothing_left_behind(), pytest.raises(UnusableValue, match="o_proj"):
            filled(placement, checkpoint.files, slab_nbytes=300, threads=4)


def test_writing_outside_the_segment_is_refused(cuda_here):
    with memory.mapped(None, 1 << 20) as mapped:
        segment = DeviceSegments(mapped.context, [Span(mapped.address, 4096)])
        with segment, segment.port(1024) as port:
            for offset, nbytes in ((-1, 8), (4090, 8)):
                with pytest.raises(ValueError, match="of a segment of 4096"):
                    port.lend(0, offset, nbytes)


@pytest.mark.parametrize("grows", ["buffer", "scratch"])
def test_what_a_port_gives_up_for_more_is_not_taken_from_a_copy_that_is_still_to_be_done(cuda_here, grows):
    """Two streams have one each; a device that copies as late as it may would find the memory gone, and be lost."""
    with memory.mapped(None, 1 << 20) as mapped:
        segment = DeviceSegments(mapped.context, [Span(mapped.address, mapped.nbytes)], computing=HostPointers())
        with segment, segment.port(1024) as port, segment.port(1024) as other:
            for one in (port, other):
                one.bring(one.scratch("source", 256), one.buffer(256))
            getattr(port, grows)(*(["source"] if grows == "scratch" else []), 512)
            segment.finish()
        mapped.context.synchronize()


def test_the_module_names_nothing_of_torch_or_numpy():
    assert not {"torch", "numpy", "np"} & set(vars(device))
