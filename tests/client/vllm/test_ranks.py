"""Where a worker of vLLM has its weights: by the device it computes on. No vLLM is needed for it, and no GPU."""

import pytest
import torch

from tests.support.fakecuda import CudaHere, FakeDevice
from weightcached.client.vllm.obtain import Wish, serve_words
from weightcached.client.vllm.options import LoaderOptions
from weightcached.client.vllm.ranks import home_of, number_of
from weightcached.protocol.config import Parallel
from weightcached.protocol.errors import DeviceAbsent, UnsupportedModel
from weightcached.protocol.memory.chosen import HOST


def test_a_cpu_s_are_in_host_memory() -> None:
    assert home_of(torch.device("cpu")) == HOST


def test_a_gpu_s_are_on_that_very_gpu_whatever_it_is_called_here(
    cuda_here: CudaHere, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    first, second = FakeDevice(), FakeDevice()
    cuda_here.fake.plug(first, second)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    cuda_here.reset()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    found = {name: home_of(torch.device(name)).device for name in ("cuda:0", "cuda:1", "cuda")}
    assert found == {"cuda:0": f"gpu-{second.uuid}", "cuda:1": f"gpu-{first.uuid}", "cuda": f"gpu-{first.uuid}"}
    assert [number_of(torch.device(name)) for name in ("cuda", "cuda:0", "cpu")] == [1, 0, 0]
    with pytest.raises(DeviceAbsent):
        home_of(torch.device("cuda:2"))
    home = home_of(torch.device("cuda:0"))
    wish = Wish(LoaderOptions(), "n", tmp_path, Parallel(tp_size=2, tp_rank=1), "auto", home=home)
    assert wish.place.device == f"gpu-{second.uuid}"
    words = serve_words(wish)
    assert words[words.index("--device") + 1] == f"cuda:{second.uuid}"
    assert words[words.index("--memory") + 1] == "cuda-vmm"


def test_a_device_that_no_memory_kind_is_for_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedModel, match="vLLM on xpu"):
        home_of(torch.device("xpu"))
