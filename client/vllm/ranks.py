"""Which rank of the model this worker is, by vLLM's own parallel state, and on which device, in the words of a place.

Owns the translation, and the arrangements that no daemon serves: they are refused by name, because their shards would
have the right shapes and the wrong experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcached.protocol.config import Parallel
from weightcached.protocol.errors import UnsupportedModel
from weightcached.protocol.memory.chosen import HOST, Chosen, chosen
from weightcached.protocol.ranks import rank_of

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig


def parallel_of(vllm_config: VllmConfig, model_config: ModelConfig) -> Parallel:
    """This worker's sizes and ranks; vLLM's groups have to be initialised. Raises UnsupportedModel."""
    from vllm.distributed import parallel_state

    config = vllm_config.parallel_config
    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    sizes = {"tp": tp.world_size, "pp": pp.world_size, "ep": 1}
    ranks: dict[str, int | None] = {"tp": tp.rank_in_group, "pp": pp.rank_in_group, "ep": None}
    placement = "linear"
    if model_config.is_moe:
        _require_known_experts(config)
        if config.enable_expert_parallel:
            experts = parallel_state.get_ep_group()
            sizes["ep"], ranks["ep"] = experts.world_size, experts.rank_in_group
            placement = config.expert_placement_strategy if experts.world_size > 1 else "linear"
    return rank_of(sizes, ranks, placement=placement)


def home_of(device: torch.device) -> Chosen:
    """Where the weights of a worker that computes on ``device`` are to be: in host memory, or on its GPU, by UUID. The
    driver and torch number what this process sees alike.

    Raises UnsupportedModel for another kind of device, DeviceAbsent for a GPU that the driver does not show.
    """
    if device.type == "cpu":
        return HOST
    if device.type != "cuda":
        raise UnsupportedModel(
            "this release has no memory kind for this device",
            expected="vLLM on a CPU or on NVIDIA's GPUs",
            found=f"vLLM on {device.type}",
            next_step="use weight_cache_mode 'off' on this device",
        )
    return chosen(f"cuda:{number_of(device)}")


def number_of(device: torch.device) -> int:
    """The number of ``device`` in this process: of a GPU that is only called by its kind, the current one's."""
    import torch

    if device.type == "cuda" and device.index is None:
        return torch.cuda.current_device()
    return device.index or 0


def _require_known_experts(config: object) -> None:
    """Which experts a rank has must follow from its ranks alone."""
    sliced = not getattr(config, "enable_expert_parallel", False)
    unknown = {
        "EPLB, which moves and doubles experts": getattr(config, "enable_eplb", False),
        "prefill context parallelism": getattr(config, "prefill_context_parallel_size", 1) > 1,
        "experts sliced across data-parallel replicas": sliced and getattr(config, "data_parallel_size", 1) > 1,
    }
    if found := [what for what, used in unknown.items() if used]:
        raise UnsupportedModel(
            "experts are placed here as no daemon places them",
            expected="tensor, pipeline or expert parallelism without redundant experts",
            found="; ".join(found),
            next_step="leave that out (with data parallelism, add --enable-expert-parallel), "
            "or use weight_cache_mode 'off'",
        )
