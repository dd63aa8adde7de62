"""What mapped memory cannot give is refused by the name of the argument that asks for it."""

from typing import Any

import pytest
import torch
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

from weightcached.client.transformers.fit import require_plain
from weightcached.protocol.errors import InvalidOption

CPU = torch.device("cpu")
ASKED: dict[str, dict[str, Any]] = {
    "device_map": {"device_map": {"model": "cpu", "lm_head": 0}},
    "tp_plan": {"device_mesh": "a mesh of two"},
    "quantization_config": {"hf_quantizer": FineGrainedFP8HfQuantizer(FineGrainedFP8Config(), pre_quantized=False)},
}


@pytest.mark.parametrize("name", [*ASKED])
def test_places_and_values_that_no_mapping_has(name: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        require_plain(LoadStateDictConfig(**ASKED[name]), None, CPU)
    assert name in str(caught.value)
    assert caught.value.found


def test_weights_of_one_s_own() -> None:
    with pytest.raises(InvalidOption, match="state_dict"):
        require_plain(LoadStateDictConfig(), {}, CPU)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_an_ordinary_load_on_this_host_is_not_refused(device_map: dict[str, str] | None) -> None:
    pre_quantized = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(), pre_quantized=True)
    require_plain(LoadStateDictConfig(device_map=device_map, hf_quantizer=pre_quantized), None, CPU)


@pytest.mark.parametrize("device_map", [None, {"": "cuda:1"}, {"": 1}, {"": torch.device("cuda", 1)}, {"": "cuda"}])
def test_the_gpu_that_has_the_weights_may_be_named(device_map: dict[str, Any] | None) -> None:
    require_plain(LoadStateDictConfig(device_map=device_map), None, torch.device("cuda", 1))


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": 0}, {"": "cuda:0"}, {"model": 1, "lm_head": "disk"}])
def test_another_device_than_that_of_the_weights_is_refused_with_both(device_map: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="device_map") as caught:
        require_plain(LoadStateDictConfig(device_map=device_map), None, torch.device("cuda", 1))
    assert "and weights on cuda:1" in str(caught.value.found)
