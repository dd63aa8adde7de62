"""Quantized checkpoints for tests: a tiny Llama whose linear layers are stored as a list of `Stored` says, with random
bits. What each rank should hold of them the naive reference says (`referenced.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import RawTensor, tiny_config, tiny_shapes, write_checkpoint
from tests.support.execution import Outcome

TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class Stored:
    """One tensor of a linear layer ``[outputs, inputs]``."""

    suffix: str
    code: str
    shape: Callable[[int, int], tuple[int, ...]]
    outputs: int | None = None
    """The axis along the outputs; ``None``: it has none."""
    needed: bool = True
    """Whether anything is made of it."""


def bits(name: str, shape: Sequence[int], code: str) -> torch.Tensor:
    """A tensor of random bits that follow from its name; floating-point scales are finite numbers."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH[code]
    if dtype in (torch.bfloat16, torch.float16, torch.float32):
        return (torch.rand(tuple(shape), generator=generator) + 0.5).to(dtype)
    itemsize = torch.empty(0, dtype=dtype).element_size()
    count = int(torch.Size(shape).numel()) * itemsize
    raw = torch.randint(0, 120, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(tuple(shape))


def raw(tensor: torch.Tensor) -> RawTensor:
    code = next(code for code, dtype in TORCH.items() if dtype == tensor.dtype)
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return RawTensor(code, tuple(tensor.shape), data)


Scheme = Iterable[Stored]


def tensors_of(config: Mapping[str, Any], scheme: Scheme, *, plain: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors; modules of which a name in ``plain`` is a part stay as they were."""
    made = {}
    for name, shape in _shapes(config).items():
        module = name.removesuffix(".weight")
        linear = ".experts." in module or any(module.endswith(part) for parts in FUSED.values() for part in parts)
        if not linear or any(part in module for part in plain):
            made[name] = bits(name, shape, "BF16")
            continue
        for stored in scheme:
            tensor = f"{module}.{stored.suffix}"
            made[tensor] = bits(tensor, stored.shape(*shape), stored.code)
    return made


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The plain checkpoint's tensors; Mixtral's have experts in the place of the dense family's MLP."""
    shapes = tiny_shapes(config)
    experts = config.get("num_local_experts")
    if experts is None:
        return shapes
    made = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.block_sparse_moe"
        made[f"{at}.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            for projection, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
                made[f"{at}.experts.{expert}.{projection}.weight"] = shape
    return made


def write(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    return write_checkpoint(
        directory, config, {"model.safetensors": {name: raw(tensor) for name, tensor in tensors.items()}}
    )


def config_of(quantization: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """The tiny Llama's config.json, with sizes that pack and group on four ranks."""
    sizes = {"intermediate_size": 64, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2}
    return tiny_config(**{**sizes, **overrides}, quantization_config=dict(quantization))


def loaded(outcome: Outcome) -> dict[str, torch.Tensor]:
    """Parameter name → tensor, aliases left out."""
    made = {}
    for name, row in outcome.rows.items():
        if row.alias_of is None:
            flat = torch.frombuffer(bytearray(outcome.data[name]), dtype=getattr(torch, row.dtype))
            made[name] = flat.reshape(row.shape)
    return made


def require_equal(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), what
    same = got.flatten().contiguous().view(torch.uint8) == wanted.flatten().contiguous().view(torch.uint8)
    assert same.all(), what


def without(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}
