"""Where weights are to live: what people type becomes one identity, the same in every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.fakecuda import CudaHere, FakeDevice
from weightcached.protocol.config import CacheConfig, build_config
from weightcached.protocol.errors import DeviceAbsent, DeviceFailed, InvalidOption
from weightcached.protocol.memory.chosen import HOST, Chosen, chosen, device_named
from weightcached.protocol.memory.cuda_vmm import CudaVmm

SLOW = FakeDevice(uuid="aaaaaaaa-0000-4000-8000-000000000001", speed=1)
FAST = FakeDevice(uuid="bbbbbbbb-0000-4000-8000-000000000002", speed=2)
MIG = FakeDevice(uuid="cccccccc-0000-4000-8000-000000000003", mig=True, speed=0)


@pytest.mark.parametrize(
    ("visible", "order", "device", "expected"),
    [
        (None, None, "cuda:0", FAST),  # the driver lists the fastest first
        (None, "PCI_BUS_ID", "cuda:0", SLOW),
        ("1", None, "cuda", SLOW),
        ("1,0", None, "cuda:0", SLOW),
        (f"GPU-{SLOW.uuid}", None, "cuda:0", SLOW),
        ("GPU-bbbb", None, "cuda", FAST),
        (f"MIG-{MIG.uuid}", None, "cuda", MIG),
        (None, None, f"cuda:GPU-{SLOW.uuid}", SLOW),
        (None, None, f"cuda:{SLOW.uuid.upper()}", SLOW),
        (None, None, f"cuda:MIG-{MIG.uuid}", MIG),
        (None, None, "cuda:GPU-aaaa", SLOW),
        (None, None, "cuda:MIG-cccc", MIG),
    ],
)
def test_every_spelling_comes_down_to_the_uuid(
    cuda_here: CudaHere,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    order: str | None,
    device: str,
    expected: FakeDevice,
) -> None:
    cuda_here.fake.plug(SLOW, FAST, MIG)
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        if value is not None:
            monkeypatch.setenv(name, value)
    found = chosen(device)
    assert (found.memory, found.device) == ("cuda-vmm", f"gpu-{expected.uuid}")


def test_a_whole_uuid_and_a_kind_need_no_driver(cuda_here: CudaHere) -> None:
    assert chosen(f"cuda:{SLOW.uuid}", "cuda-ipc") == Chosen("cuda-ipc", f"gpu-{SLOW.uuid}")
    assert device_named(f"cuda:GPU-{SLOW.uuid}") == f"gpu-{SLOW.uuid}"
    assert cuda_here.fake.calls() == []


@pytest.mark.parametrize("lacking", ["no-virtual-memory", "no-descriptors"])
def test_a_device_that_cannot_share_by_descriptor_shares_by_handle_and_the_reason_is_told(
    cuda_here: CudaHere, lacking: str
) -> None:
    cuda_here.fake.worsen(lacking)
    found = chosen("cuda")
    assert (found.memory, found.device) == ("cuda-ipc", f"gpu-{cuda_here.fake.devices[0].uuid}")
    assert lacking.removeprefix("no-").replace("-", " ") in found.reason
    assert "Fake GPU" in found.reason
    assert cuda_here.fake.contexts() == []
    with pytest.raises(DeviceFailed, match=r"failed.*NOT_SUPPORTED.*--memory"):
        CudaVmm(cuda_here.fake.devices[0].uuid).allocate(1, name="test")


def test_a_kind_that_was_asked_for_is_not_second_guessed(cuda_here: CudaHere) -> None:
    cuda_here.fake.worsen("no-descriptors")
    assert chosen("cuda", "cuda-vmm").memory == "cuda-vmm"
    cuda_here.fake.worsen()
    assert chosen("cuda", "cuda-ipc").memory == "cuda-ipc"
    assert chosen("cuda").memory == "cuda-vmm"


@pytest.mark.parametrize("device", ["gpu", "cuda0", "CUDA", "", "cpu:0", "cuda:", "cuda:x", "cuda:-1"])
def test_what_is_no_device_is_an_error_with_the_spellings(cuda_here: CudaHere, device: str) -> None:
    with pytest.raises(InvalidOption):
        chosen(device)


def test_one_of_several_is_never_guessed(cuda_here: CudaHere) -> None:
    alike = FakeDevice(SLOW.uuid[:-1] + ("1" if SLOW.uuid[-1] == "0" else "0"))
    cuda_here.fake.plug(SLOW, FAST, alike)
    with pytest.raises(InvalidOption, match="several devices fit"):
        chosen("cuda")
    with pytest.raises(InvalidOption, match="several devices fit") as raised:
        chosen(f"cuda:{SLOW.uuid[:8]}")
    assert [one.uuid in str(raised.value) for one in (SLOW, alike, FAST)] == [True, True, False]
    with pytest.raises(DeviceAbsent):
        chosen("cuda:3")


def test_a_process_that_is_shown_no_device_is_told_by_what(
    cuda_here: CudaHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DeviceAbsent, match="CUDA_VISIBLE_DEVICES=7"):
        chosen("cuda")


@pytest.mark.parametrize(
    ("device", "memory"), [("cpu", "cuda-vmm"), ("cpu", "cuda-ipc"), ("cuda:0", "host"), ("cuda:0", "vram")]
)
def test_kind_and_device_go_together(device: str, memory: str) -> None:
    with pytest.raises(InvalidOption, match="memory kind"):
        chosen(device, memory)


def test_host_memory_is_the_default(tmp_path: Path) -> None:
    assert chosen("cpu") == chosen("cpu", "host") == HOST
    config = build_config(tiny_llama(tmp_path), layout="hf", tp_size=1, tp_rank=0)
    assert (config.memory, config.device) == (HOST.memory, HOST.device)


def test_ranks_on_several_gpus_are_of_one_model_state_and_configs_tell_the_gpu(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)

    def config_on(device: FakeDevice, rank: int) -> CacheConfig:
        return build_config(
            model, layout="fused", tp_size=2, tp_rank=rank, memory="cuda-vmm", device=f"gpu-{device.uuid}"
        )

    assert config_on(SLOW, 0).rankless_fingerprint == config_on(FAST, 1).rankless_fingerprint
    assert config_on(SLOW, 0).fingerprint != config_on(FAST, 0).fingerprint
    with pytest.raises(InvalidOption, match="memory kind"):
        build_config(model, layout="hf", tp_size=1, tp_rank=0, memory="cuda-vmm")
