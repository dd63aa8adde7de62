"""An engine's state onto a GPU, on the driver that needs none: from host memory, and from the GPU itself.

torch here has no CUDA: a tensor on the GPU is one over the fake device's memory, which the driver takes for what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

import pytest
import torch
import xxhash

from tests.support.fakecuda import OUT_OF_MEMORY, UNKNOWN, CudaHere
from tests.support.gpu_engine import host_tensor
from weightcached.loader.device import DeviceSegments
from weightcached.loader.engines import onto_device
from weightcached.loader.engines.moving import copy_to, dense, place_of
from weightcached.loader.engines.onto_device import copy_onto
from weightcached.loader.engines.state import PlacedState, place_state
from weightcached.loader.filling import to_be_filled
from weightcached.protocol.engines import Built, NamedTensor
from weightcached.protocol.errors import DeviceFailed, InsufficientMemory, UnsupportedModel
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.cuda_vmm import CudaVmm

Copied = Callable[[PlacedState], tuple[bytes, dict[str, bytes], list[tuple[int, int]]]]


@pytest.fixture
def kind(cuda_here: CudaHere) -> CudaVmm:
    return CudaVmm(cuda_here.fake.devices[0].uuid)


@pytest.fixture
def copied(kind: CudaVmm, monkeypatch: pytest.MonkeyPatch) -> Copied:
    """``copied(state)``: the segment's bytes, the digests, and what progress said. Slabs are small."""
    monkeypatch.setattr(onto_device, "SLAB_NBYTES", 4096)

    def copied(state: PlacedState) -> tuple[bytes, dict[str, bytes], list[tuple[int, int]]]:
        nbytes, told = state.segment_nbytes, []
        with OwnedFds([kind.allocate(nbytes, name="test")]) as memory:
            with to_be_filled(list(memory), kind, nbytes=(nbytes,)) as target:
                assert isinstance(target, DeviceSegments)
                places = [one for one in state.placed if one.alias_of is None]
                digests = copy_onto(places, target, lambda done, total: told.append((done, total)))
            with closing(kind.map_readonly(memory[0], nbytes=nbytes)) as mapping:
                view = mapping.view()
                data = bytes(view[:])
                del view
        return data, digests, told

    return copied


def tensors() -> dict[str, torch.Tensor]:
    source = torch.arange(1, 25, dtype=torch.float64).reshape(4, 6)
    return {
        "large": torch.arange(20_000, dtype=torch.int32),
        "plain": source.clone(),
        "transposed": source.clone().t(),
        "columns": source.clone()[:, 1:3],
        "expanded": source.clone()[:, :1].expand(4, 5),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "eight bits": torch.arange(5, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
    }


def state_of(named: Mapping[str, torch.Tensor]) -> PlacedState:
    return place_state(Built(tensors=[NamedTensor(*one) for one in named.items()]))


def on_host(state: PlacedState) -> bytes:
    """What a host's segment has."""
    segment = memoryview(bytearray(state.segment_nbytes))
    for one in state.placed:
        if one.nbytes:
            copy_to(place_of(one, segment), one.tensor)
    return bytes(segment)


def require_digests(state: PlacedState, data: bytes, digests: dict[str, bytes]) -> None:
    assert digests == {
        one.name: xxhash.xxh3_128(data[one.offset : one.offset + one.nbytes]).digest()
        for one in state.placed
        if one.alias_of is None
    }


def test_what_was_built_in_host_memory_is_on_the_gpu_what_it_is_in_a_hosts_segment(copied: Copied) -> None:
    named = tensors()
    state = state_of({**named, "tied": named["plain"]})
    data, digests, told = copied(state)
    assert data == on_host(state)
    require_digests(state, data, digests)
    total = sum(one.nbytes for one in state.placed if one.alias_of is None)
    assert told[-1] == (total, total)


@pytest.fixture
def built_there(kind: CudaVmm, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, torch.Tensor]]:
    """The same tensors, in memory of the GPU that an engine has."""
    named = tensors()
    source = state_of(named)
    with OwnedFds([kind.allocate(source.segment_nbytes, name="engine's")]) as memory:
        mapping = kind.map_shared(memory[0], nbytes=source.segment_nbytes)
        whole = host_tensor(mapping)
        there = {}
        for one in source.placed:
            if not one.nbytes:
                continue
            place = whole[one.offset : one.offset + one.nbytes].view(one.tensor.dtype)
            there[one.name] = place.as_strided(one.tensor.shape, one.tensor.stride())
            copy_to(there[one.name], one.tensor)
        within = range(mapping.address, mapping.address + mapping.resident_nbytes)
        monkeypatch.setattr(onto_device, "is_on_gpu", lambda tensor: tensor.data_ptr() in within)
        yield there
        there.clear()
        del whole, place
        mapping.close()


def test_what_was_built_on_the_gpu_is_copied_by_the_driver(
    cuda_here: CudaHere, copied: Copied, built_there: dict[str, torch.Tensor]
) -> None:
    within_gpu = {name: one for name, one in built_there.items() if name not in ("columns", "expanded")}
    state = state_of(within_gpu)
    before = len(cuda_here.fake.calls())
    data, digests, _ = copied(state)
    calls = cuda_here.fake.calls()[before:]
    assert calls.count("cuMemcpyDtoDAsync") == len(within_gpu)
    assert "cuMemcpyHtoDAsync" not in calls
    assert data == on_host(state)
    require_digests(state, data, digests)
    gaps = state_of({name: built_there[name] for name in ("columns", "expanded")})
    for one in gaps.placed:
        closed = dense(one)  # on a GPU a tensor of torch's own there; here it is the host's
        assert closed.numel() == one.nbytes
        assert closed.numpy().tobytes() == on_host(gaps)[one.offset : one.offset + one.nbytes]


def test_a_state_of_both_memories(copied: Copied, built_there: dict[str, torch.Tensor]) -> None:
    state = state_of({"there": built_there["large"], "here": torch.arange(5000, dtype=torch.float32)})
    data, digests, _ = copied(state)
    assert data == on_host(state)
    require_digests(state, data, digests)


@pytest.mark.parametrize(
    ("call", "nth", "result", "error"),
    [
        ("cuMemcpyDtoDAsync", 1, UNKNOWN, DeviceFailed),
        ("cuMemcpyDtoHAsync", 3, UNKNOWN, DeviceFailed),
        ("cuMemcpyHtoDAsync", 2, UNKNOWN, DeviceFailed),
        ("cuCtxSynchronize", 1, UNKNOWN, DeviceFailed),
        ("cuStreamSynchronize", 2, UNKNOWN, DeviceFailed),
        ("cuMemHostAlloc", "*", OUT_OF_MEMORY, InsufficientMemory),
    ],
)
def test_whatever_fails_is_told_and_nothing_is_held(
    cuda_here: CudaHere,
    copied: Copied,
    built_there: dict[str, torch.Tensor],
    call: str,
    nth: int | str,
    result: int,
    error: type[Exception],
) -> None:
    """That this process holds nothing afterwards is what ``cuda_here`` sees to."""
    state = state_of({"there": built_there["large"], "here": torch.arange(5000, dtype=torch.float32)})
    if isinstance(nth, int):
        nth += cuda_here.fake.calls().count(call)
    cuda_here.fake.fail((call, nth, result))
    try:
        with pytest.raises(error):
            copied(state)
    finally:
        cuda_here.fake.fail()


def test_a_tensor_of_another_gpu_is_refused_by_name() -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 1)

    tensor = torch.zeros(2).as_subclass(Elsewhere)
    with pytest.raises(UnsupportedModel, match=r"tensor w cannot be shared.*or on cuda:0.*device cuda:1"):
        place_state(Built(tensors=[NamedTensor("w", tensor)]), gpu=0)
    with pytest.raises(UnsupportedModel, match=r"a tensor in host memory; found: device cuda:1"):
        place_state(Built(tensors=[NamedTensor("w", tensor)]))
