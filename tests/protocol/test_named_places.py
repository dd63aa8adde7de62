"""Places that a command names: by sizes and ranks in host memory, by device on GPUs; each by its own parser only."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.support.fakecuda import CudaHere, FakeDevice
from weightcached.protocol.errors import DeviceAbsent, InvalidOption
from weightcached.protocol.memory.cuda import driver
from weightcached.protocol.named_places import add_rank_arguments, named_places

RUNTIME_DIR = Path("/run/weightcached")
UUID = "8f3c21ab-0000-4000-8000-000000000001"


def named(*words: str) -> list[str] | None:
    """The device words of the places."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name")
    add_rank_arguments(parser)
    places = named_places(parser.parse_args(words), RUNTIME_DIR)
    return None if places is None else [place.device for place in places]


def test_nothing_named_is_no_place_and_not_every_place() -> None:
    assert named() is None


def test_sizes_alone_are_of_host_memory() -> None:
    assert named("--tp-size", "2") == ["host-tp0of2", "host-tp1of2"]
    assert named("--tp-size", "2", "--tp-rank", "1") == ["host-tp1of2"]
    assert named("--device", "cpu") == ["host-tp0of1"]


def test_a_whole_uuid_names_a_place_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_there() -> None:
        raise DeviceAbsent("no driver")

    monkeypatch.setattr(driver, "bindings", nothing_there)
    assert named("--device", f"cuda:GPU-{UUID.upper()}") == [f"gpu-{UUID}"]


def test_cuda_is_the_visible_gpu_with_the_ranks_number(cuda_here: CudaHere) -> None:
    first, second = FakeDevice(speed=2), FakeDevice()
    cuda_here.fake.plug(first, second)
    cuda_here.reset()
    words = ("--device", "cuda", "--tp-size", "2")
    assert named(*words) == [f"gpu-{first.uuid}", f"gpu-{second.uuid}"]
    assert named(*words, "--tp-rank", "1") == [f"gpu-{second.uuid}"]  # a rank keeps its number when it is named alone
    assert named("--device", "cuda:1") == [f"gpu-{second.uuid}"]
    with pytest.raises(DeviceAbsent):
        named("--device", "cuda:2")
    with pytest.raises(InvalidOption, match="several devices fit"):
        named("--device", "cuda")


def test_two_ranks_are_not_at_one_place() -> None:
    with pytest.raises(InvalidOption, match="ranks 0 and 1 would be at one place"):
        named("--device", f"cuda:{UUID}", "--tp-size", "2")


@pytest.mark.parametrize("words", [("--tp-rank", "0"), ("--tp-size", "2", "--tp-rank", "2"), ("--device", "tpu")])
def test_what_names_no_place_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidOption):
        named(*words)
