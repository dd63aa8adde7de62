"""Models with experts, through the real executor: each rank's bytes are those of naive slicing with torch.

Tensor, expert and pipeline parallelism, alone and together, for every family; and the oracle's case.
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.support import expert_models
from tests.support.execution import Outcome, load
from tests.support.expert_shards import Spot, shard

FAMILIES = list(expert_models.CONFIGS)

SPOTS = [
    *(Spot(tp=size, tp_rank=rank) for size in (1, 2, 4, 8) for rank in range(size)),
    *(Spot(ep=size, ep_rank=rank) for size in (2, 3, 4) for rank in range(size)),
    *(Spot(ep=size, ep_rank=rank, round_robin=True) for size in (2, 3, 4) for rank in range(size)),
    *(Spot(tp=2, tp_rank=rank % 2, ep=4, ep_rank=rank) for rank in range(4)),
    *(Spot(pp=size, pp_rank=rank) for size in (2, 3) for rank in range(size)),
    *(Spot(tp=2, tp_rank=rank, ep=2, ep_rank=rank, pp=2, pp_rank=stage) for rank in range(2) for stage in range(2)),
]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """(config.json, directory, tensors) of a small model of each family."""
    config = expert_models.config_of(request.param)
    directory = expert_models.write(tmp_path_factory.mktemp("experts") / request.param, config)
    return config, directory, load_file(directory / "model.safetensors")


def bits(outcome: Outcome) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (row.dtype, row.shape, bytes(outcome.data[name])) for name, row in outcome.rows.items()}


def naive_bits(values: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            value.contiguous().flatten().view(torch.uint8).numpy().tobytes(),
        )
        for name, value in values.items()
    }


@pytest.mark.parametrize("spot", SPOTS, ids=str)
def test_each_rank_has_the_bytes_that_slicing_whole_tensors_gives(model, spot):
    config, directory, tensors = model
    outcome = load(directory, layout="fused", **spot.options)
    expected = shard(tensors, config, spot)
    if config["model_type"] == "deepseek_v3":
        for name, value in expected.items():
            if name.endswith("e_score_correction_bias"):
                expected[name] = value.to(torch.float32)
    assert bits(outcome) == naive_bits(expected)
