"""CUDA's calls and what owns their gifts, on a driver that keeps the real one's rules without a GPU."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading

import pytest

from tests.support.fakecuda import CONTEXT_NBYTES, DEVICE_NBYTES, GRANULARITY, FakeDevice
from tests.support.legacy_holder import legacy_holder
from weightcached.protocol.errors import DeviceAbsent, DeviceFailed, InsufficientMemory, InvalidOption, TransferError
from weightcached.protocol.memory.cuda import devices, driver, nvml, physical
from weightcached.protocol.memory.cuda.context import Context, Event, Stream
from weightcached.protocol.memory.cuda.legacy import DeviceMemory, OpenedMemory
from weightcached.protocol.memory.cuda.mappings import Mapping
from weightcached.protocol.memory.cuda.staging import Pinned

ONE = "0a1b2c3d-0000-4000-8000-000000000001"
OTHER = "0a1b2c3d-ffff-4000-8000-000000000002"
PART = "99999999-0000-4000-8000-000000000003"


@pytest.fixture
def device(cuda_here) -> devices.Device:
    return devices.find(None)


@pytest.fixture
def current(device):
    """A context, current in this thread."""
    with Context(device) as context, context.current():
        yield context


def mapping(device: devices.Device) -> Mapping:
    return Mapping(GRANULARITY, alignment=0, device=device)


# Devices


def three(cuda_here) -> None:
    cuda_here.fake.plug(
        FakeDevice(ONE, speed=1), FakeDevice(OTHER, speed=9, nbytes=32 << 20), FakeDevice(PART, mig=True)
    )


def test_a_device_is_known_by_its_uuid_whatever_its_ordinal_is(cuda_here, monkeypatch):
    """The driver lists the fastest first, then by slot where it is told to, then only what it is shown."""
    three(cuda_here)
    seen = []
    for variables in ({}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {"CUDA_VISIBLE_DEVICES": "1"}):
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        cuda_here.reset()
        driver.initialise.cache_clear()
        seen.append({device.uuid: device.ordinal for device in devices.devices()})
    assert seen == [{OTHER: 0, ONE: 1, PART: 2}, {ONE: 0, OTHER: 1, PART: 2}, {OTHER: 0}]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", [OTHER]),
        ("1,0", [ONE, OTHER]),
        (f"GPU-{ONE}", [ONE]),
        ("GPU-0a1b2c3d-f", [OTHER]),
        (f"MIG-{PART}", [PART]),
        ("1,7,0", [ONE]),  # what comes after a word that means nothing is not heeded
    ],
)
def test_what_the_driver_is_shown_is_what_is_seen(cuda_here, monkeypatch, visible, expected):
    three(cuda_here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [device.uuid for device in devices.devices()] == expected


@pytest.mark.parametrize("wanted", [1, "1", ONE, ONE.upper(), f"GPU-{ONE}", "0a1b2c3d-0", "gpu-0a1b2c3d-00"])
def test_a_device_is_found_by_index_uuid_or_its_beginning(cuda_here, wanted):
    three(cuda_here)
    assert devices.find(wanted) == devices.Device(ordinal=1, uuid=ONE, name="Fake GPU", nbytes=DEVICE_NBYTES)


@pytest.mark.parametrize("wanted", [f"MIG-{PART}", PART, "9999"])
def test_a_mig_instance_is_a_device(cuda_here, wanted):
    three(cuda_here)
    assert devices.find(wanted).uuid == PART


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        *((wanted, InvalidOption) for wanted in (None, "0a1b", "cuda:0", "", "0a")),
        *((wanted, DeviceAbsent) for wanted in (7, "abcdef", f"GPU-{'f' * 8}")),
    ],
)
def test_a_word_that_means_no_device_or_several_is_refused_with_those_there_are(cuda_here, wanted, error):
    three(cuda_here)
    with pytest.raises(error) as raised:
        devices.find(wanted)
    assert ONE in str(raised.value) or raised.value.expected


def test_the_only_device_needs_no_name(cuda_here):
    assert devices.find(None).uuid == cuda_here.fake.devices[0].uuid


def test_no_device_says_what_the_process_is_shown(cuda_here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceAbsent, match=r"CUDA_ERROR_NO_DEVICE.*CUDA_VISIBLE_DEVICES"):
        devices.devices()


def test_without_a_driver_the_error_names_it_and_without_bindings_the_extra(tmp_path):
    """In processes of their own, which have neither libcuda.so.1 nor, the second one, cuda-bindings."""
    program = (
        "import sys\n"
        "from weightcached.protocol.errors import DeviceAbsent\n"
        "from weightcached.protocol.memory.cuda import devices, nvml\n"
        "for question in (devices.devices, lambda: nvml.memory('0')):\n"
        "    try: question()\n"
        "    except DeviceAbsent as error: print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    without_bindings = "import sys; sys.modules['cuda.bindings.driver'] = None\n"
    said = [
        subprocess.run([sys.executable, "-c", p], env=environment, check=True, capture_output=True, text=True).stdout
        for p in (program, without_bindings + program)
    ]
    assert "has no cuInit" in said[0]
    assert "libnvidia-ml.so.1" in said[0]
    assert "pip install 'weightcached[cuda]'" in said[1]


def test_using_devices_imports_neither_torch_nor_numpy(fake_cuda):
    program = (
        "import sys\n"
        "from weightcached.protocol.memory.cuda import devices, nvml, physical\n"
        "device = devices.find(None)\n"
        "with physical.allocate(physical.granularity(device), device=device) as memory: nvml.memory(device.uuid)\n"
        "print(*{'torch', 'numpy'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    environment = fake_cuda.whole_environment
    assert subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout == "\n"
    assert fake_cuda.leaks() == {}


def test_a_forked_child_has_no_driver(device):
    pid = os.fork()
    if pid == 0:
        try:
            physical.granularity(device)
            os._exit(1)
        except DeviceFailed as error:
            os._exit(0 if "CUDA_ERROR_NOT_INITIALIZED" in str(error) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# Memory without addresses


def test_memory_made_here_is_read_through_a_descriptor_when_its_maker_has_let_go(cuda_here, device):
    with physical.allocate(GRANULARITY, device=device) as memory, mapping(device) as at:
        at.map(memory, writable=True)
        ctypes.memset(at.address, 7, 16)
        fd = memory.export()
    assert not os.get_inheritable(fd)
    assert cuda_here.fake.used_nbytes() == GRANULARITY
    with mapping(device) as at:
        with physical.from_descriptor(fd, nbytes=GRANULARITY, device=device) as again:
            os.close(fd)
            at.map(again, writable=False)
        assert ctypes.string_at(at.address, 16) == b"\7" * 16  # the mapping alone keeps it
    assert cuda_here.fake.used_nbytes() == 0


def test_making_memory_makes_no_context(cuda_here, device):
    with physical.allocate(GRANULARITY, device=device):
        assert cuda_here.fake.contexts() == []
        assert nvml.memory(device.uuid) == nvml.Memory(DEVICE_NBYTES, DEVICE_NBYTES - GRANULARITY, GRANULARITY)


def test_a_full_device_is_an_error_that_names_who_holds_its_memory(cuda_here, current, device):
    with physical.allocate(DEVICE_NBYTES // 2, device=device), pytest.raises(InsufficientMemory) as raised:
        physical.allocate(DEVICE_NBYTES // 2, device=device)
    assert "cuMemCreate" in str(raised.value.__cause__)
    assert f"28 of 64 MiB free; held by pid {os.getpid()}" in str(raised.value)
    assert "36 MiB" in str(raised.value)
    with pytest.raises(InsufficientMemory, match=f"held by pid {os.getpid()}"):
        DeviceMemory(DEVICE_NBYTES, device=device)


def test_a_full_device_is_an_error_where_nobody_can_say_who_holds_it(cuda_here, device):
    cuda_here.fake.fail(("nvmlDeviceGetMemoryInfo", "*", 15))
    with pytest.raises(InsufficientMemory, match=r"unknown .nvmlDeviceGetMemoryInfo failed.*GPU is lost"):
        physical.allocate(2 * DEVICE_NBYTES, device=device)


def test_a_descriptor_of_anything_else_is_refused(device, tmp_path):
    with (tmp_path / "file").open("wb") as file, pytest.raises(DeviceFailed, match="cuMemImportFromShareableHandle"):
        physical.from_descriptor(file.fileno(), nbytes=GRANULARITY, device=device)


def test_memory_of_a_device_that_is_not_seen_is_refused(cuda_here, monkeypatch):
    three(cuda_here)
    with physical.allocate(GRANULARITY, device=devices.find(ONE)) as memory:
        fd = memory.export()
    cuda_here.reset()
    driver.initialise.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{OTHER}")
    with pytest.raises(DeviceAbsent, match="CUDA_ERROR_INVALID_DEVICE"):
        physical.from_descriptor(fd, nbytes=GRANULARITY, device=devices.find(OTHER))
    os.close(fd)


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(0, GRANULARITY), (1, GRANULARITY), (GRANULARITY, GRANULARITY), (GRANULARITY + 1, 2 << 21)]
)
def test_sizes_are_rounded_up_to_what_the_device_allocates(device, nbytes, expected):
    assert physical.rounded(nbytes, physical.granularity(device)) == expected


# Mappings


def test_a_write_to_a_read_only_mapping_fails_and_takes_the_context(fake_cuda):
    """In a process of its own: nothing of a lost context can be given back."""
    program = (
        "import os\n"
        "from weightcached.protocol.memory.cuda import devices, physical\n"
        "from weightcached.protocol.memory.cuda.context import Context, Stream\n"
        "from weightcached.protocol.memory.cuda.mappings import Mapping\n"
        "from weightcached.protocol.memory.cuda.staging import Pinned\n"
        "context = Context(device := devices.find(None))\n"
        "memory = physical.allocate(1 << 21, device=device)\n"
        "mapping = Mapping(1 << 21, alignment=0, device=device)\n"
        "mapping.map(memory, writable=False)\n"
        "with context.current():\n"
        "    stream, source = Stream(), Pinned(16)\n"
        "    stream.copy_in(mapping.address, source.address, 16)\n"
        "    for wait in (stream.synchronize, context.synchronize):\n"
        "        try: wait()\n"
        "        except Exception as error: print(type(error).__name__, error, flush=True)\n"
        "os._exit(0)"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=fake_cuda.whole_environment, check=True, capture_output=True, text=True)
    first, second = result.stdout.splitlines()
    assert first.startswith("DeviceFailed cuStreamSynchronize failed")
    assert second.startswith("DeviceFailed cuCtxSynchronize failed")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in first
    assert "end this process" in first


def test_memory_taken_away_comes_back_at_the_same_addresses(device):
    with physical.allocate(GRANULARITY, device=device) as memory, mapping(device) as at:
        at.map(memory, writable=True)
        address = at.address
        ctypes.memset(address, 9, GRANULARITY)
        at.unmap()
        at.unmap()
        assert not at.mapped
        at.map(memory, writable=False)
        assert (at.address, ctypes.string_at(address, 3)) == (address, b"\t\t\t")


def test_a_mapping_shows_one_memory_at_a_time_and_none_once_closed(device):
    with physical.allocate(GRANULARITY, device=device) as memory:
        with mapping(device) as at:
            at.map(memory, writable=True)
            with pytest.raises(ValueError, match="already"):
                at.map(memory, writable=True)
        assert at.closed
        with pytest.raises(ValueError, match="closed"):
            at.map(memory, writable=True)
        at.unmap()


def test_the_last_reference_gives_everything_back(cuda_here, device):
    memory, at = physical.allocate(GRANULARITY, device=device), mapping(device)
    at.map(memory, writable=True)
    assert cuda_here.live() == "handles=1 reserved=1 mapped=1"
    del memory, at
    gc.collect()
    assert cuda_here.live() == ""


# Streams


def test_copies_happen_in_order_and_not_before_somebody_waits(current, device):
    with DeviceMemory(64, device=device) as memory, Stream() as stream, Pinned(64) as host:
        host.view()[:] = b"a" * 64
        stream.copy_in(memory.address, host.address, 64)
        host.view()[:] = b"b" * 64  # too early: a copy of the old bytes is no longer certain
        stream.synchronize()
        host.view()[:] = bytes(64)
        stream.copy_out(host.address, memory.address, 64)
        stream.synchronize()
        assert bytes(host.view()) == b"b" * 64


def test_an_event_says_when_what_came_before_it_is_done(current, device):
    with DeviceMemory(64, device=device) as memory, Stream() as first, Stream() as second, Pinned(64) as host:
        with Event() as filled:
            first.zero(memory.address, 64)
            filled.record(first)
            assert not filled.reached()
            second.wait_for(filled)
            second.copy_within(memory.address, memory.address + 32, 16)
            second.copy_out(host.address, memory.address, 64)
            second.synchronize()
            assert filled.reached()
            filled.wait()
        assert bytes(host.view()) == bytes(64)


def test_memory_that_is_there_already_can_be_pinned(current, device, cuda_here):
    buffer = ctypes.create_string_buffer(b"there" * 10, 64)
    with DeviceMemory(64, device=device) as memory, Stream() as stream:
        with Pinned(64, address=ctypes.addressof(buffer)) as pinned:
            assert "registered=1" in cuda_here.live()
            stream.copy_in(memory.address, pinned.address, 64)
            stream.synchronize()
        assert ctypes.string_at(memory.address, 5) == b"there"
    with pytest.raises(ValueError, match="given back"):
        pinned.view()


def test_a_context_is_shared_and_current_only_where_it_is_made_so(cuda_here, device):
    with Context(device) as one, Context(device) as other:
        assert (one.handle, cuda_here.fake.contexts()) == (other.handle, [os.getpid()])
        assert nvml.holders(device.uuid) == (nvml.Holder(os.getpid(), CONTEXT_NBYTES),)
        with pytest.raises(DeviceFailed, match="CUDA_ERROR_INVALID_CONTEXT"):
            Stream()
    assert cuda_here.fake.contexts() == []


def test_a_device_without_room_for_a_context_says_who_holds_its_memory(cuda_here):
    cuda_here.fake.plug(FakeDevice(nbytes=CONTEXT_NBYTES - 1))
    with pytest.raises(InsufficientMemory, match=r"the device has no room.*context.*MiB free; held by"):
        Context(devices.find(None))


def test_things_of_a_context_are_given_back_from_any_thread(current, device, cuda_here):
    things = [Stream(), Event(), Pinned(64), DeviceMemory(64, device=device)]
    thread = threading.Thread(target=things.clear)  # drops the last references where no context is current
    thread.start()
    thread.join()
    assert cuda_here.live() == "contexts=1"


# Legacy memory


def test_legacy_memory_is_opened_by_another_process_while_its_holder_lives(cuda_here, current):
    with legacy_holder(cuda_here.fake, 4096, 5) as (holder, handle):
        with OpenedMemory(handle, nbytes=4096) as opened:
            assert ctypes.string_at(opened.address, 4096) == b"\5" * 4096
        holder.kill()
        holder.wait()
        assert cuda_here.fake.used_nbytes() == 0
        with pytest.raises(DeviceFailed, match=r"cuIpcOpenMemHandle failed.*CUDA_ERROR_INVALID_HANDLE"):
            OpenedMemory(handle, nbytes=4096)


def test_legacy_memory_is_not_opened_where_it_comes_from(current, device):
    with DeviceMemory(64, device=device) as memory, pytest.raises(DeviceFailed, match="CUDA_ERROR_INVALID_CONTEXT"):
        OpenedMemory(memory.export(), nbytes=64)


def test_a_handle_of_another_size_is_refused(current):
    with pytest.raises(TransferError, match="64 bytes"):
        OpenedMemory(b"short", nbytes=64)
