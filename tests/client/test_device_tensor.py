"""A device's segment as a tensor, on a driver that needs no GPU: what torch is asked for, and what is not taken."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fakecuda import GRANULARITY, CudaHere
from tests.support.gpu_engine import host_tensor
from weightcached.client.segments import device_tensor
from weightcached.protocol.errors import TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.cuda_vmm import CudaVmm, DeviceMapping

OURS, ANOTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def segment(cuda_here: CudaHere) -> Iterator[DeviceMapping]:
    kind = CudaVmm(cuda_here.fake.devices[0].uuid)
    with OwnedFds([kind.allocate(GRANULARITY, name="test")]) as fds:
        mapping = kind.map_private(fds[0], nbytes=GRANULARITY)
    yield mapping
    mapping.close()


def torch_makes(monkeypatch: pytest.MonkeyPatch, made: Any) -> list[Any]:
    """Torch without CUDA makes this of whatever it is given; the calls' arguments."""
    asked: list[Any] = []

    def as_tensor(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        return made

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    return asked


def on_gpu(device: torch.device, address: int) -> Any:
    """As much of a tensor there as anybody asks for before it is taken."""
    return SimpleNamespace(device=device, data_ptr=lambda: address)


def test_torch_is_told_the_segments_device_and_what_it_took_as_it_is_is_the_tensor(
    segment: DeviceMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = on_gpu(OURS, segment.address)
    asked = torch_makes(monkeypatch, made)
    assert device_tensor(segment) is made
    assert asked == [((segment,), {"device": OURS})]


@pytest.mark.parametrize("case", ["a copy", "on another GPU", "on the host"])
def test_a_copy_or_a_tensor_of_another_device_is_refused(
    segment: DeviceMapping, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """One thing is wrong at a time: the other device's tensor is at the segment's address, and the copy where it is."""
    made = {
        "a copy": on_gpu(OURS, segment.address + 512),
        "on another GPU": on_gpu(ANOTHER, segment.address),
        "on the host": host_tensor(segment),
    }[case]
    torch_makes(monkeypatch, made)
    with pytest.raises(TransferError, match="torch did not take a segment as it is") as raised:
        device_tensor(segment)
    assert raised.value.expected == f"a tensor at {segment.address:#x} on cuda:0"
    assert raised.value.found == f"one at {made.data_ptr():#x} on {made.device}"
