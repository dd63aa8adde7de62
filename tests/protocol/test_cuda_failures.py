"""Each call that the project makes of CUDA's driver and of NVML is checked: it fails here, by name, and is reported.

The calls are read from the source, wherever they are made, so that a new one without a failing test is found: by
``use_all``, which has to make it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.fakecuda import GRANULARITY, OUT_OF_MEMORY, UNKNOWN
from tests.support.legacy_holder import legacy_holder
from weightcached.protocol.errors import DeviceAbsent, DeviceFailed, InsufficientMemory, SwapFailed
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.cuda import devices, driver, nvml, physical
from weightcached.protocol.memory.cuda.context import Context, Event, Stream
from weightcached.protocol.memory.cuda.legacy import DeviceMemory, OpenedMemory
from weightcached.protocol.memory.cuda.mappings import Mapping
from weightcached.protocol.memory.cuda.staging import Pinned
from weightcached.protocol.memory.cuda_ipc import CudaIpc
from weightcached.protocol.memory.cuda_vmm import CudaVmm

ROOT = Path(__file__).parents[2]
SOURCES = {
    path: path.read_text()
    for room in ("protocol", "loader", "daemon", "client")
    for path in (ROOT / room).rglob("*.py")
}
MADE = sorted({name for text in SOURCES.values() for name in re.findall(r'"(cu[A-Z]\w+|nvml[A-Z]\w+)"', text)})
GIVING_BACK = {
    "cuCtxPopCurrent",
    "cuDevicePrimaryCtxRelease",
    "cuEventDestroy",
    "cuIpcCloseMemHandle",
    "cuMemAddressFree",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuStreamDestroy",
}


def use_virtual_memory(device: devices.Device) -> None:
    assert physical.granularity(device) == GRANULARITY
    fds = []
    try:
        with physical.allocate(GRANULARITY, device=device) as memory:
            fds.append(memory.export())
        CudaVmm(device.uuid).verify(fds[0], nbytes=GRANULARITY, what="a segment")
        with (
            physical.from_descriptor(fds[0], nbytes=GRANULARITY, device=device) as memory,
            Mapping(GRANULARITY, alignment=0, device=device) as at,
        ):
            at.map(memory, writable=True)
            at.unmap()
            at.map(memory, writable=False)
    finally:
        for fd in fds:
            os.close(fd)


def use_streams(context: Context) -> None:
    page = ctypes.create_string_buffer(4096)
    with (
        DeviceMemory(4096, device=context.device) as memory,
        Pinned(4096) as host,
        Pinned(4096, address=ctypes.addressof(page)),
        Stream() as stream,
        Event() as event,
    ):
        try:
            stream.zero(memory.address, 4096)
            stream.copy_in(memory.address, host.address, 4096)
            stream.copy_within(memory.address, memory.address + 64, 64)
            stream.copy_out(host.address, memory.address, 4096)
            event.record(stream)
            stream.wait_for(event)
            while not event.reached():
                pass
            event.wait()
            stream.synchronize()
            memory.export()
        finally:
            context.synchronize()  # no copy may be under way when memory is given back


def use_all(handle: bytes | None) -> None:
    """Every call that the project makes, with another process's ``handle`` those too that open it."""
    device = devices.find(None)
    assert devices.why_no_descriptors(device) is None
    assert device.uuid in nvml.uuids()
    nvml.memory(device.uuid)
    nvml.holders(device.uuid)
    use_virtual_memory(device)
    with Context(device) as context, context.current():
        use_streams(context)
        if handle is not None:
            OpenedMemory(handle, nbytes=4096).close()


@pytest.fixture
def anew(cuda_here):
    """NVML is asked anew whether it is there, too."""
    nvml.initialise.cache_clear()
    yield cuda_here
    cuda_here.fake.fail()
    nvml.initialise.cache_clear()


def test_all_calls_of_the_project_are_made_and_leave_nothing(anew):
    with legacy_holder(anew.fake, 4096, 5) as (_, handle):
        use_all(handle)
    assert set(MADE) - set(anew.fake.calls(os.getpid())) == set()


@pytest.mark.parametrize("name", MADE)
def test_a_call_that_fails_is_an_error_that_names_it(anew, name):
    """Nothing that was made before is kept, but what the driver refuses to take back."""
    if name.startswith("cuIpc"):
        with legacy_holder(anew.fake, 4096, 5) as (_, handle):
            anew.fake.fail((name, 1, UNKNOWN))
            with pytest.raises(DeviceFailed) as raised:
                use_all(handle)
    else:
        anew.fake.fail((name, "*" if name == "nvmlDeviceGetHandleByUUID" else 1, UNKNOWN))
        with pytest.raises(DeviceFailed) as raised:
            use_all(None)
    message = str(raised.value)
    assert message.startswith(f"{name} failed; expected: ")
    assert ("CUDA_ERROR_UNKNOWN" if name.startswith("cu") else "Unknown Error") in message
    assert raised.value.next_step
    if name in GIVING_BACK:
        anew.reset()
    del raised
    gc.collect()


def life_of_vmm(kind: CudaVmm, fds: OwnedFds) -> None:
    """As keeper, worker and engine, one after the other."""
    for _ in range(2):
        fds.append(kind.allocate(GRANULARITY, name="test"))
    kind.verify(fds[0], nbytes=GRANULARITY, what="a segment")
    with kind.map_shared(fds[0], nbytes=GRANULARITY):
        pass
    with (
        kind.map_private(fds[0], nbytes=GRANULARITY) as used,
        kind.map_private(fds[1], nbytes=GRANULARITY) as other,
    ):
        view = used.view()
        assert len(view[:8]) == 8
        used.settle()
        used.unmap()
        used.remap()
        used.exchange(other)
        del view


def life_of_holder(kind: CudaIpc, fds: OwnedFds) -> None:
    fds.append(kind.allocate(GRANULARITY, name="test"))
    with kind.hold(fds[0], nbytes=GRANULARITY) as held:
        kind.seal(fds[0])
        assert len(held.view()[:8]) == 8
        held.settle()


def life_of_opener(kind: CudaIpc, fds: OwnedFds, handle: bytes) -> None:
    fds.append(kind.allocate(GRANULARITY, name="test"))
    os.pwrite(fds[0], handle, 0)
    kind.seal(fds[0])
    kind.verify(fds[0], nbytes=GRANULARITY, what="a segment")
    with kind.map_private(fds[0], nbytes=GRANULARITY) as opened:
        view = opened.view()
        assert len(view[:8]) == 8
        opened.settle()
        del view


LIVES = ["keeper, worker and engine by descriptors", "holder", "engine by a handle"]


@pytest.mark.parametrize("whose", LIVES)
def test_whichever_call_of_a_life_fails_is_told_and_leaves_only_what_is_not_taken_back(anew, whose, monkeypatch):
    """One after the other, by its number in the life: also those that are made again for something else."""
    unheard = []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: unheard.append(str(said.exc_value)))

    def live(handle: bytes) -> list[str]:
        """What is said, if anything is."""
        anew.reset()
        driver.initialise.cache_clear()
        uuid = anew.fake.devices[0].uuid
        try:
            with OwnedFds() as fds:
                if whose == LIVES[0]:
                    life_of_vmm(CudaVmm(uuid), fds)
                elif whose == LIVES[1]:
                    life_of_holder(CudaIpc(uuid), fds)
                else:
                    life_of_opener(CudaIpc(uuid), fds, handle)
        except (DeviceFailed, SwapFailed) as error:
            return [str(error)]
        return []

    with legacy_holder(anew.fake, GRANULARITY, 5) as (_, handle):
        before = anew.fake.calls(os.getpid())
        assert live(handle) == []
        calls = anew.fake.calls(os.getpid())[len(before) :]
        assert set(calls) & {"cuMemMap", "cuIpcGetMemHandle", "cuIpcOpenMemHandle"}
        for number, call in enumerate(calls, 1):
            anew.fake.fail(("*", number, UNKNOWN))
            unheard.clear()
            said = live(handle)
            gc.collect()
            assert any(f"{call} failed" in one for one in (*said, *unheard)), (number, call, said)
            # On the way back: in its context, and perhaps by a finalizer, who has nobody to raise it to.
            gives_back = call in GIVING_BACK or (call == "cuCtxPushCurrent" and calls[number] in GIVING_BACK)
            assert said or gives_back, (number, call, unheard)
            assert gives_back or anew.live() == "", (number, call)
            anew.fake.fail()
    anew.reset()


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister", "cuMemMap"])
def test_no_memory_is_an_error_of_its_own(anew, name):
    anew.fake.fail((name, 1, OUT_OF_MEMORY))
    with pytest.raises(InsufficientMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        use_all(None)
    gc.collect()


@pytest.mark.parametrize("result", [34, 46, 100, 101, 803, 805])
def test_a_device_that_is_not_there_for_us_is_an_error_of_its_own(anew, result):
    anew.fake.fail(("cuInit", 1, result))
    with pytest.raises(DeviceAbsent, match="cuInit found no device") as raised:
        use_all(None)
    assert raised.value.next_step


def test_a_result_newer_than_the_bindings_is_an_error_with_its_number(anew):
    anew.fake.fail(("cuInit", 1, 12345))
    with pytest.raises(DeviceFailed, match="12345"):
        use_all(None)


def test_no_call_goes_past_the_checks():
    """An attribute ``.cuXxx`` or ``.nvmlXxx`` is a call whose result somebody would have to look at himself."""
    unchecked = re.compile(r"\.(cu[A-Z]\w+|nvml(?!ErrorString)[A-Z]\w+)")
    found = [f"{path.relative_to(ROOT)}: {call}" for path, text in SOURCES.items() for call in unchecked.findall(text)]
    assert found == []


def test_every_call_of_the_project_is_one_that_the_fake_driver_has():
    entries = "".join(path.read_text() for path in (ROOT / "tests" / "fakecuda").glob("*.c"))
    had = set(re.findall(r"ENTRY\((\w+)\)", entries)) | set(re.findall(r"^int (nvml\w+)\(", entries, re.MULTILINE))
    assert set(MADE) - had == set()
