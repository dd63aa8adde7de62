"""Memory kind ``cuda-vmm`` on a driver that needs no GPU: what each side may do, what is refused, what is left.

Device pointers of that driver are host pointers, so tests look at a mapping's bytes where they are.
"""

from __future__ import annotations

import ctypes
import os

import pytest

from tests.support.fakecuda import (
    DEVICE_NBYTES,
    GRANULARITY,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    UNKNOWN,
    CudaHere,
    FakeDevice,
)
from weightcached.protocol.errors import (
    DeviceAbsent,
    DeviceFailed,
    InsufficientMemory,
    InvalidOption,
    SwapFailed,
    SwapRefused,
    TransferError,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host
from weightcached.protocol.memory.cuda import physical
from weightcached.protocol.memory.cuda_vmm import CudaVmm, DeviceMapping

NBYTES = GRANULARITY + 1000
IMPORTING = ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]


@pytest.fixture
def kind(cuda_here: CudaHere) -> CudaVmm:
    return CudaVmm(cuda_here.fake.devices[0].uuid)


def segment_with(kind: CudaVmm, data: bytes) -> OwnedFds:
    """A segment of :data:`NBYTES` that begins with ``data``."""
    fds = OwnedFds([kind.allocate(NBYTES, name="test")])
    mapping = kind.map_shared(fds[0], nbytes=NBYTES)
    ctypes.memmove(mapping.address, data, len(data))
    mapping.close()
    return fds


def test_what_a_worker_wrote_is_what_engines_read(kind: CudaVmm) -> None:
    with segment_with(kind, b"weights") as fds:
        mapping = kind.map_private(fds[0], nbytes=NBYTES)
        fds.close()  # the mapping alone keeps the memory
        assert ctypes.string_at(mapping.address, 7) == b"weights"
        assert bytes(mapping.view()[3:7]) == b"ghts"
        assert len(mapping.view()) == mapping.nbytes == NBYTES
        assert mapping.resident_nbytes == kind.resident_nbytes(NBYTES) == 2 * GRANULARITY
        mapping.close()


def test_a_descriptor_alone_keeps_the_memory_and_the_last_one_frees_it(kind: CudaVmm, cuda_here: CudaHere) -> None:
    with segment_with(kind, b"") as fds:
        fds.append(kind.export(fds[0]))
        os.close(fds.take(0))
        assert cuda_here.fake.used_nbytes() == 2 * GRANULARITY
        assert cuda_here.live() == ""
        assert not os.get_inheritable(fds[1])
    assert cuda_here.fake.used_nbytes() == 0


def test_a_mapping_nobody_refers_to_any_more_gives_everything_back(kind: CudaVmm, cuda_here: CudaHere) -> None:
    with segment_with(kind, b"") as fds:
        mapping: DeviceMapping | None = kind.map_private(fds[0], nbytes=NBYTES)
    assert "mapped=1" in cuda_here.live()
    assert mapping is not None
    del mapping
    assert cuda_here.live() == ""


def test_engines_map_without_leave_to_write(kind: CudaVmm) -> None:
    with segment_with(kind, b"weights") as fds:
        mapping = kind.map_private(fds[0], nbytes=NBYTES)
        with open("/proc/self/maps") as maps:
            [line] = [line for line in maps if line.startswith(f"{mapping.address:x}-")]
        assert line.split()[1] == "r--s"
        mapping.close()


def test_sleep_and_wake_keep_the_addresses_and_the_bytes(kind: CudaVmm, cuda_here: CudaHere) -> None:
    with segment_with(kind, b"weights") as fds:
        mapping = kind.map_private(fds[0], nbytes=NBYTES)
    address = mapping.address
    for _ in range(2):
        mapping.unmap()
        mapping.unmap()
        assert not mapping.mapped
        assert cuda_here.fake.used_nbytes() == 2 * GRANULARITY
        with pytest.raises(ValueError, match="unmapped"):
            mapping.view()
        mapping.remap()
        mapping.remap()
        assert mapping.address == address
        assert ctypes.string_at(address, 7) == b"weights"
    mapping.unmap()
    mapping.close()
    with pytest.raises(ValueError, match="closed"):
        mapping.remap()


def test_a_wake_that_fails_can_be_tried_again(kind: CudaVmm, cuda_here: CudaHere) -> None:
    with segment_with(kind, b"weights") as fds:
        mapping = kind.map_private(fds[0], nbytes=NBYTES)
    mapping.unmap()
    for call in ("cuMemMap", "cuMemSetAccess"):
        cuda_here.fake.fail((call, "*", UNKNOWN))
        with pytest.raises(DeviceFailed, match=call):
            mapping.remap()
        cuda_here.fake.fail()
    mapping.remap()
    assert ctypes.string_at(mapping.address, 7) == b"weights"
    mapping.close()


def test_a_sleep_that_the_driver_refuses_leaves_the_memory_mapped_and_can_be_tried_again(
    kind: CudaVmm, cuda_here: CudaHere
) -> None:
    with segment_with(kind, b"weights") as fds:
        mapping = kind.map_private(fds[0], nbytes=NBYTES)
    for give_up in (mapping.unmap, mapping.close):
        cuda_here.fake.fail(("cuMemUnmap", "*", UNKNOWN))
        with pytest.raises(DeviceFailed, match="cuMemUnmap"):
            give_up()
        assert (mapping.mapped, mapping.closed) == (True, False)
        assert bytes(mapping.view()[:7]) == b"weights"
        cuda_here.fake.fail()
        give_up()
        assert not mapping.mapped
        if not mapping.closed:
            mapping.remap()
    assert (mapping.closed, cuda_here.live()) == (True, "")
    mapping.close()


def test_what_was_mapped_without_access_and_stayed_so_is_not_taken_for_awake(
    kind: CudaVmm, cuda_here: CudaHere
) -> None:
    with segment_with(kind, b"weights") as fds:
        mapping = kind.map_private(fds[0], nbytes=NBYTES)
    mapping.unmap()
    cuda_here.fake.fail(("cuMemSetAccess", "*", UNKNOWN), ("cuMemUnmap", "*", UNKNOWN))
    with pytest.raises(DeviceFailed, match="cuMemSetAccess"):
        mapping.remap()
    assert not mapping.mapped
    with pytest.raises(DeviceFailed, match="cuMemUnmap"):
        mapping.remap()
    cuda_here.fake.fail()
    mapping.remap()
    assert ctypes.string_at(mapping.address, 7) == b"weights"
    mapping.close()


@pytest.mark.parametrize("made", ["allocated", "verified"])
def test_a_handle_that_the_driver_does_not_take_back_is_told_and_offered_again_before_room_is_measured(
    kind: CudaVmm, cuda_here: CudaHere, made: str
) -> None:
    """Nobody else has it, so nobody else could: no descriptor is left of it, and it alone keeps the memory."""
    with segment_with(kind, b"") if made == "verified" else OwnedFds() as fds:
        before = os.listdir("/proc/self/fd")
        cuda_here.fake.fail(("cuMemRelease", "*", UNKNOWN))
        with pytest.raises(DeviceFailed, match=f"cuMemRelease.*{kind.uuid}"):
            kind.verify(fds[0], nbytes=NBYTES, what="it") if fds else kind.allocate(NBYTES, name="test")
        assert os.listdir("/proc/self/fd") == before
    for _ in range(2):
        assert kind.admit(1).free_nbytes == DEVICE_NBYTES - 2 * GRANULARITY
    cuda_here.fake.fail()
    assert kind.admit(1).free_nbytes == DEVICE_NBYTES


@pytest.mark.parametrize("call", IMPORTING)
def test_of_calls_that_all_fail_the_first_is_what_is_told(kind: CudaVmm, cuda_here: CudaHere, call: str) -> None:
    """Of a lost device nothing can be given back, and that is not what whoever reads the error has to know."""
    with segment_with(kind, b"") as fds:
        cuda_here.fake.lose(call)
        with pytest.raises(DeviceFailed, match=rf"^{call} failed.*{kind.uuid}"):
            kind.map_private(fds[0], nbytes=NBYTES)
    cuda_here.reset()


def two_generations(kind: CudaVmm) -> tuple[DeviceMapping, DeviceMapping]:
    mapped = []
    for data in (b"generation 1", b"generation 2"):
        with segment_with(kind, data) as fds:
            mapped.append(kind.map_private(fds[0], nbytes=NBYTES))
    return mapped[0], mapped[1]


def test_an_exchange_shows_other_memory_at_the_same_address_and_again_is_the_way_back(
    kind: CudaVmm, cuda_here: CudaHere
) -> None:
    used, other = two_generations(kind)
    address = used.address
    used.settle()
    assert cuda_here.fake.calls()[-3:-1] == ["cuCtxSynchronize", "cuCtxPopCurrent"]
    moves = ["cuMemUnmap", "cuMemMap", "cuMemSetAccess"]
    for number, expected in enumerate((b"generation 2", b"generation 1", b"generation 2")):
        before = len(cuda_here.fake.calls())
        used.exchange(other)
        assert cuda_here.fake.calls()[before:] == (moves if number else ["cuMemUnmap", *moves])
        assert (used.address, ctypes.string_at(address, 12)) == (address, expected)
        with open("/proc/self/maps") as maps:
            [line] = [line for line in maps if line.startswith(f"{address:x}-")]
        assert line.split()[1] == "r--s"
    other.close()
    assert ctypes.string_at(address, 12) == b"generation 2"
    assert cuda_here.fake.used_nbytes() == 2 * GRANULARITY
    used.close()
    assert cuda_here.live() == ""


def test_a_mapping_that_sleeps_wakes_with_the_memory_it_was_exchanged_for(kind: CudaVmm) -> None:
    used, other = two_generations(kind)
    used.unmap()
    used.exchange(other)
    assert not used.mapped
    used.remap()
    assert ctypes.string_at(used.address, 12) == b"generation 2"
    used.close()
    other.close()


@pytest.mark.parametrize(
    ("call", "number"), [("cuMemUnmap", 1), ("cuMemUnmap", 2), ("cuMemMap", 1), ("cuMemSetAccess", 1)]
)
def test_an_exchange_that_the_driver_refuses_leaves_what_was_there(
    kind: CudaVmm, cuda_here: CudaHere, call: str, number: int
) -> None:
    """Whoever takes back what was exchanged before it does not take back the one that failed."""
    used, other = two_generations(kind)
    cuda_here.fake.fail((call, cuda_here.fake.calls(os.getpid()).count(call) + number, UNKNOWN))
    with pytest.raises(SwapFailed, match=f"are what they were.*{call}"):
        used.exchange(other)
    cuda_here.fake.fail()
    assert ctypes.string_at(used.address, 12) == b"generation 1"
    used.exchange(other)
    assert ctypes.string_at(used.address, 12) == b"generation 2"
    used.close()
    other.close()
    assert cuda_here.live() == ""


def test_an_exchange_without_a_way_back_says_so_and_a_remap_brings_it_back(kind: CudaVmm, cuda_here: CudaHere) -> None:
    used, other = two_generations(kind)
    cuda_here.fake.fail(("cuMemMap", "*", UNKNOWN))
    with pytest.raises(SwapFailed, match="neither the new one nor itself"):
        used.exchange(other)
    cuda_here.fake.fail()
    assert not used.mapped
    used.remap()
    assert ctypes.string_at(used.address, 12) == b"generation 1"
    used.close()
    other.close()


def test_another_size_is_not_exchanged(kind: CudaVmm) -> None:
    used, other = two_generations(kind)
    with segment_with(kind, b"") as fds:
        smaller = kind.map_private(fds[0], nbytes=NBYTES - 1)
    with pytest.raises(SwapRefused, match="other sizes"):
        used.exchange(smaller)
    for mapping in (used, other, smaller):
        mapping.close()
    with pytest.raises(ValueError, match="closed"):
        used.exchange(other)


def test_what_is_no_memory_of_a_device_is_refused_by_name(kind: CudaVmm, tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"x" * NBYTES)
    read, write = os.pipe()
    for fd in (host.allocate(NBYTES, name="test"), os.open(tmp_path / "file", os.O_RDWR), read, write):
        with OwnedFds([fd]) as fds, pytest.raises(TransferError, match="segment 0 is not memory"):
            kind.verify(fds[0], nbytes=NBYTES, what="segment 0")


def test_memory_of_another_size_than_announced_is_not_mapped(kind: CudaVmm, cuda_here: CudaHere) -> None:
    with segment_with(kind, b"") as fds:
        kind.verify(fds[0], nbytes=NBYTES, what="segment 0")
        with pytest.raises(TransferError, match="is not"):
            kind.map_private(fds[0], nbytes=NBYTES + 4 * GRANULARITY)
    assert cuda_here.live() == ""


def test_memory_of_another_device_is_refused_though_both_are_seen(cuda_here: CudaHere) -> None:
    ours, other = FakeDevice(), FakeDevice()
    cuda_here.fake.plug(ours, other)
    with segment_with(CudaVmm(other.uuid), b"") as fds:
        with pytest.raises(TransferError, match="another device"):
            CudaVmm(ours.uuid).verify(fds[0], nbytes=NBYTES, what="segment 0")
        CudaVmm(other.uuid).verify(fds[0], nbytes=NBYTES, what="segment 0")


@pytest.mark.parametrize(
    ("call", "result", "error"),
    [
        ("cuMemGetAllocationPropertiesFromHandle", UNKNOWN, DeviceFailed),
        ("cuMemImportFromShareableHandle", UNKNOWN, DeviceFailed),
        ("cuMemImportFromShareableHandle", INVALID_VALUE, TransferError),
    ],
)
def test_a_check_that_fails_leaves_nothing_and_the_memory_where_it_is(
    kind: CudaVmm, cuda_here: CudaHere, call: str, result: int, error: type[Exception]
) -> None:
    with segment_with(kind, b"") as fds:
        cuda_here.fake.fail((call, "*", result))
        with pytest.raises(error, match=call):
            kind.verify(fds[0], nbytes=NBYTES, what="segment 0")
        assert cuda_here.live() == ""
        cuda_here.fake.fail()
        kind.verify(fds[0], nbytes=NBYTES, what="segment 0")


def test_a_device_that_is_not_seen_is_absent_by_its_uuid(cuda_here: CudaHere) -> None:
    missing = FakeDevice().uuid
    with pytest.raises(DeviceAbsent, match=missing):
        CudaVmm(missing).allocate(NBYTES, name="test")


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemGetAllocationGranularity"])
def test_allocation_that_fails_leaves_nothing(kind: CudaVmm, cuda_here: CudaHere, call: str) -> None:
    cuda_here.fake.fail((call, "*", UNKNOWN))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(DeviceFailed, match=call):
        kind.allocate(NBYTES, name="test")
    assert os.listdir("/proc/self/fd") == before
    assert (cuda_here.live(), cuda_here.fake.used_nbytes()) == ("", 0)


@pytest.mark.parametrize("call", IMPORTING)
@pytest.mark.parametrize(("result", "error"), [(INVALID_VALUE, TransferError), (UNKNOWN, DeviceFailed)])
def test_an_import_that_fails_leaves_nothing_and_says_whose_fault_it_is(
    kind: CudaVmm, cuda_here: CudaHere, call: str, result: int, error: type[Exception]
) -> None:
    with segment_with(kind, b"") as fds:
        cuda_here.fake.fail((call, "*", result))
        with pytest.raises(error, match=call):
            kind.map_private(fds[0], nbytes=NBYTES)
        assert cuda_here.live() == ""


def test_a_full_device_says_how_much_is_free_and_admits_nothing(kind: CudaVmm, cuda_here: CudaHere) -> None:
    assert kind.admit(NBYTES).free_nbytes == DEVICE_NBYTES
    with segment_with(kind, b""):
        assert kind.admit(NBYTES).free_nbytes == DEVICE_NBYTES - 2 * GRANULARITY
        with pytest.raises(InsufficientMemory, match="60 of 64 MiB free"):
            kind.admit(DEVICE_NBYTES)
        with pytest.raises(InsufficientMemory, match="60 of 64 MiB free"):
            kind.allocate(DEVICE_NBYTES, name="test")


def test_without_nvml_allocation_decides(kind: CudaVmm, cuda_here: CudaHere) -> None:
    cuda_here.fake.fail(("nvmlDeviceGetMemoryInfo", "*", UNKNOWN), ("cuMemCreate", "*", OUT_OF_MEMORY))
    assert "not known" in kind.admit(NBYTES).source
    with pytest.raises(InsufficientMemory, match="unknown"):
        kind.allocate(NBYTES, name="test")


def test_torch_is_shown_one_array_of_bytes_that_it_will_take(kind: CudaVmm) -> None:
    with segment_with(kind, b"weights") as fds:
        mapping = kind.map_private(fds[0], nbytes=NBYTES)
    shown = mapping.__cuda_array_interface__
    assert (shown["shape"], shown["typestr"], shown["data"]) == ((NBYTES,), "|u1", (mapping.address, False))
    mapping.close()
    with pytest.raises(ValueError, match="closed"):
        _ = mapping.__cuda_array_interface__


def test_a_segment_is_as_large_as_it_takes_until_the_environment_says_how_large_it_may_be(
    cuda_here: CudaHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = cuda_here.fake.devices[0].uuid
    assert CudaVmm(uuid).segment_max_nbytes is None
    assert cuda_here.fake.calls() == []
    monkeypatch.setenv(physical.LARGEST_VARIABLE, str(3 * GRANULARITY - 1))
    assert CudaVmm(uuid).segment_max_nbytes == 2 * GRANULARITY
    for unusable in ("", "-1", "1e9", str(GRANULARITY - 1)):
        monkeypatch.setenv(physical.LARGEST_VARIABLE, unusable)
        with pytest.raises(InvalidOption, match=physical.LARGEST_VARIABLE):
            _ = CudaVmm(uuid).segment_max_nbytes
