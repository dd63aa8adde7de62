"""Scales for blocks, of any size on any shapes: what a rank multiplies out is its share of the whole, or all refuse.

By rounding alone, a share that starts within a block would get the scale of the next one.
"""

from collections.abc import Iterator

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.execution import load
from tests.support.quantized import (
    FUSED,
    Stored,
    config_of,
    loaded,
    require_equal,
    tensors_of,
    write,
)
from weightcached.loader.reference import Reference
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import UnsupportedModel

SIZES = (1, 2, 4)


def scheme_of(block: tuple[int, int]) -> list[Stored]:
    rows, columns = block
    return [
        Stored("weight", "F8_E4M3", lambda o, i: (o, i), 0),
        Stored("weight_scale_inv", "F32", lambda o, i: (-(-o // rows), -(-i // columns)), 0),
    ]


def multiplied_out(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    spread = scale.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
    return weight.to(torch.float32) * spread[: weight.shape[0], : weight.shape[1]]


def is_refused(config: dict, block: tuple[int, int], size: int) -> bool:
    """The engine's own rule: shares are whole blocks; where nothing is shared, but for the last of stacked matrices."""

    def shares() -> Iterator[list[int]]:
        head, inner = config["head_dim"], config["intermediate_size"]
        yield [4 * head // size, head * 2 // min(size, 2), head * 2 // min(size, 2)]
        yield [inner // size, inner // size]

    rows, columns = block
    stacked = any(part % rows for parts in shares() for part in (parts if size > 1 else parts[:-1]))
    inputs = (config["head_dim"] * 4 // size, config["intermediate_size"] // size)
    return stacked or (size > 1 and any(part % columns for part in inputs))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    block=st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.sampled_from([1, 2, 3, 4, 6, 8, 16])),
    head=st.sampled_from([4, 8, 12, 16, 24]),
    hidden=st.sampled_from([20, 32, 36]),
    inner=st.sampled_from([16, 24, 48, 64, 80]),
    size=st.sampled_from(SIZES),
)
def test_every_rank_multiplies_out_to_its_share_of_the_whole_or_all_refuse(tmp_path, block, head, hidden, inner, size):
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    config = config_of(quantization, head_dim=head, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1)
    tensors = tensors_of(config, scheme_of(block))
    directory = write(tmp_path, tensors, config)
    refused = is_refused(config, block, size)
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        plain[weight] = multiplied_out(tensors[weight], tensors[name], block)
    del config["quantization_config"]
    unquantized = write(tmp_path / "plain", plain, config)
    for rank in range(size):
        at = {"layout": "fused", "tp_size": size, "tp_rank": rank}
        try:
            got = loaded(load(directory, **at))
        except UnsupportedModel:
            assert refused
            continue
        assert not refused
        with Reference(unquantized, build_config(unquantized, **at)) as reference:
            for name in FUSED:
                layer = f"model.layers.0.{name}"
                ours = multiplied_out(got[f"{layer}.weight"], got[f"{layer}.weight_scale_inv"], block)
                require_equal(ours, reference.parameter(f"{layer}.weight"), f"{layer} of rank {rank} of {size}")
