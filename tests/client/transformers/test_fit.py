"""What mapped memory cannot give is refused by the name of the argument that asks for it."""

from typing import Any

import pytest
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

from weightcached.client.transformers.fit import require_plain
from weightcached.protocol.errors import InvalidOption

ASKED: dict[str, dict[str, Any]] = {
    "device_map": {"device_map": {"model": "cpu", "lm_head": 0}},
    "tp_plan": {"device_mesh": "a mesh of two"},
    "quantization_config": {"hf_quantizer": FineGrainedFP8HfQuantizer(FineGrainedFP8Config(), pre_quantized=False)},
}


@pytest.mark.parametrize("name", [*ASKED])
def test_places_and_values_that_no_mapping_has(name: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        require_plain(LoadStateDictConfig(**ASKED[name]), None)
    assert name in str(caught.value)
    assert caught.value.found


def test_weights_of_one_s_own() -> None:
    with pytest.raises(InvalidOption, match="state_dict"):
        require_plain(LoadStateDictConfig(), {})


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_an_ordinary_load_on_this_host_is_not_refused(device_map: dict[str, str] | None) -> None:
    pre_quantized = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(), pre_quantized=True)
    require_plain(LoadStateDictConfig(device_map=device_map, hf_quantizer=pre_quantized), None)
