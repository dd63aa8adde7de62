"""(f) Plans and manifests of checkpoints with 100,000 tensors: seconds, memory, and what decoding costs an engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import checkpoints, fresh
from tests.benchmarks.checkpoints import Tensor
from tests.benchmarks.outcome import MIB, Outcome, Settings, Table, Target, milliseconds, size
from tests.benchmarks.workspace import Workspace
from tests.support import expert_models
from tests.support.checkpoints import tiny_config, tiny_shapes

PLAN_S, PLAN_BYTES, DECODE_S = 2.0, 200 * MIB, 0.050
DENSE, EXPERTS = "dense, 11,111 layers", "DeepSeek-V3 in fp8 blocks, 68 layers of 256 experts"
OPTIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    DENSE: (
        {"layout": "hf"},
        {"layout": "fused", "tp_size": 4, "quantization": "fp8"},
    ),
    EXPERTS: (
        {"layout": "fused", "tp_size": 8},
        {"layout": "fused", "tp_size": 8, "ep_size": 8},
    ),
}


@dataclass(frozen=True)
class Planned:
    """What came of planning one checkpoint with some options, several times."""

    checkpoint: str
    options: str
    tensors: int
    seconds: tuple[float, ...]
    """From opening the files to the finished plan, of the processor."""
    peak_nbytes: int
    """Of the whole process, Python included."""


def run(settings: Settings, workspace: Workspace) -> Outcome:
    rounds = 2 if settings.quick else 7
    written = {DENSE: _dense(workspace), EXPERTS: _experts(workspace)}
    planned = []
    for checkpoint, several in OPTIONS.items():
        for options in several:
            answer = fresh.call(
                workspace,
                "measured.planning:planned",
                model=str(written[checkpoint]),
                options={"tp_size": 1, "tp_rank": 0, **options},
                rounds=rounds,
            ).value
            words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
            planned.append(
                Planned(checkpoint, words, answer["tensors"], tuple(answer["seconds"]), answer["peak_nbytes"])
            )
    decoded = fresh.call(workspace, "measured.planning:decoded", model=str(written[DENSE]), rounds=3 * rounds).value
    for directory in written.values():
        workspace.remove(directory)
    return Outcome(
        "plan",
        [_plans(planned, rounds), _manifests(decoded)],
        list(_targets(planned, decoded)),
        {"planned": [vars(one) for one in planned], "decoded": decoded},
    )


def _dense(workspace: Workspace) -> Path:
    config = tiny_config(num_hidden_layers=11_111)
    tensors = [Tensor(name, "BF16", shape) for name, shape in tiny_shapes(config).items()]
    return checkpoints.write(
        workspace.directory / "dense", config, {"model.safetensors": tensors}, sparse=True
    ).directory


def _experts(workspace: Workspace) -> Path:
    """With a scale for each block of each matrix, as it is published; the matrices are smaller."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 1024, "num_attention_heads": 8}
    latent = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 128}
    counts = {"num_hidden_layers": 68, "n_routed_experts": 256, "first_k_dense_replace": 3, "v_head_dim": 128}
    config = expert_models.config_of("deepseek_v3", **sizes, **latent, **counts)
    tensors = []
    for name, shape in expert_models.shapes_of(config).items():
        is_linear = "proj" in name
        tensors.append(Tensor(name, "F8_E4M3" if is_linear else "BF16", shape))
        if is_linear:
            tensors.append(Tensor(f"{name}_scale_inv", "F32", tuple(math.ceil(extent / 128) for extent in shape)))
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return checkpoints.write(
        workspace.directory / "experts",
        {**config, "quantization_config": quantization},
        {"model.safetensors": tensors},
        sparse=True,
    ).directory


def _plans(planned: Sequence[Planned], rounds: int) -> Table:
    return Table(
        f"Plans of one rank, from headers alone (medians of {rounds})",
        ("checkpoint", "tensors", "options", "s", "peak memory of the process"),
        tuple(
            (
                one.checkpoint,
                f"{one.tensors:,}",
                one.options,
                f"{statistics.median(one.seconds):.2f}",
                size(one.peak_nbytes),
            )
            for one in planned
        ),
        ("seconds of the processor, from opening the files on; the process plans once for its peak",),
    )


def _manifests(decoded: Mapping[str, Any]) -> Table:
    row = (f"{decoded['rows']:,}", size(decoded["nbytes"]), milliseconds(statistics.median(decoded["seconds"])))
    return Table(
        "A manifest, decoded as an engine does that attaches (seconds of the processor)",
        ("rows", "bytes", "ms"),
        (row,),
    )


def _targets(planned: Sequence[Planned], decoded: Mapping[str, Any]) -> Iterator[Target]:
    slowest = max(statistics.median(one.seconds) for one in planned)
    largest = max(one.peak_nbytes for one in planned)
    decode_s = statistics.median(decoded["seconds"])
    yield Target(f"100,000 tensors planned in {PLAN_S:g} s", f"{slowest:.2f} s", slowest <= PLAN_S)
    yield Target(f"and {size(PLAN_BYTES)}", size(largest), largest <= PLAN_BYTES)
    text = f"a manifest of 100,000 rows decoded in {milliseconds(DECODE_S)} ms"
    yield Target(text, f"{milliseconds(decode_s)} ms", decode_s <= DECODE_S)
