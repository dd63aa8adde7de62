"""Quantized checkpoints for tests, and what each rank should hold of them by plain slicing of whole tensors in torch.

`write(dir, stored, config)` writes a tiny Llama whose linear layers are stored as the list of `Stored` says, with
random bits. `held(…)` is the naive reference: it knows no boxes, only which axis of a tensor runs along the outputs and
which along the inputs, and cuts by the tensor's own extents, as engines' loaders do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tests.support.checkpoints import RawTensor, tiny_config, tiny_shapes, write_checkpoint
from tests.support.execution import Outcome, load

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
ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Stored:
    """One tensor of a linear layer ``[outputs, inputs]``."""

    suffix: str
    code: str
    shape: Callable[[int, int], tuple[int, ...]]
    outputs: int | None = None
    """The axis along the outputs; ``None``: it has none, and is whole on every rank."""
    inputs: int | None = None
    fused: Literal["stack", "slots", "last", "nothing"] = "stack"
    """What a fused layer has of its parts': one below the other, scalars side by side, the last one, or nothing."""
    held_as: str | None = None
    """The code of its dtype in memory, where that is another."""


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


def held(tensors: Mapping[str, torch.Tensor], stored: Stored, layer: str, rank: int, size: int) -> torch.Tensor:
    """What the rank holds of the tensor ``stored`` of the fused ``layer`` (``model.layers.0.mlp.gate_up_proj``)."""
    prefix, name = ".".join(layer.split(".")[:3]), ".".join(layer.split(".")[3:])
    parts = [tensors[f"{prefix}.{part}.{stored.suffix}"] for part in FUSED[name]]
    if stored.fused == "slots":
        made = torch.stack([part.reshape(()) for part in parts])
    elif name in ROW_PARALLEL:
        made = parts[0] if stored.inputs is None else _share(parts[0], stored.inputs, rank, size)
    elif stored.fused == "last":
        made = parts[-1]
    else:
        shares = [_part(part, stored, at, name, rank, size) for at, part in enumerate(parts)]
        made = torch.cat(shares, stored.outputs or 0)
    return made.to(TORCH[stored.held_as]) if stored.held_as else made


def held_by_experts(
    tensors: Mapping[str, torch.Tensor], stored: Stored, at: str, experts: Iterable[int], rank: int, size: int
) -> dict[str, torch.Tensor]:
    """``w13`` and ``w2`` of the tensor ``stored`` of ``experts``, of which the rank holds one of ``size`` shares."""
    gates, downs, ups = (
        [tensors[f"{at}.experts.{expert}.{projection}.{stored.suffix}"] for expert in experts]
        for projection in ("w1", "w2", "w3")
    )
    if stored.fused in ("slots", "last"):
        scalars = [torch.stack([part.reshape(()) for part in parts]) for parts in (gates, downs, ups)]
        both = torch.stack([scalars[0], scalars[2]], dim=1)
        return {"w13": both if stored.fused == "slots" else scalars[2], "w2": scalars[1]}
    first = [
        gate
        if stored.outputs is None
        else torch.cat(
            [_share(gate, stored.outputs, rank, size), _share(up, stored.outputs, rank, size)], stored.outputs
        )
        for gate, up in zip(gates, ups, strict=True)
    ]
    second = [down if stored.inputs is None else _share(down, stored.inputs, rank, size) for down in downs]
    made = {"w13": torch.stack(first), "w2": torch.stack(second)}
    return {name: tensor.to(TORCH[stored.held_as]) if stored.held_as else tensor for name, tensor in made.items()}


def _part(tensor: torch.Tensor, stored: Stored, at: int, name: str, rank: int, size: int) -> torch.Tensor:
    if stored.outputs is None:
        return tensor
    if name == "self_attn.qkv_proj" and at > 0:  # the tiny model has two key/value heads
        return _share(tensor, stored.outputs, rank * 2 // size if size > 2 else rank, min(size, 2))
    return _share(tensor, stored.outputs, rank, size)


def _share(tensor: torch.Tensor, axis: int, rank: int, size: int) -> torch.Tensor:
    extent = tensor.shape[axis] // size
    return tensor.narrow(axis, rank * extent, extent)


def loaded(outcome: Outcome) -> dict[str, torch.Tensor]:
    """Parameter name → tensor, aliases left out."""
    made = {}
    for name, row in outcome.rows.items():
        if row.alias_of is None:
            flat = torch.frombuffer(bytearray(outcome.data[name]), dtype=getattr(torch, row.dtype))
            made[name] = flat.reshape(row.shape)
    return made


def require_held(directory: Path, tensors: Mapping[str, torch.Tensor], scheme: Sequence[Stored], size: int) -> None:
    """Load every rank of ``size`` and compare each linear layer with the reference, names, dtypes and bits."""
    layers = sorted({".".join(name.split(".")[:3]) for name in tensors if name.startswith("model.layers.")})
    for rank in range(size):
        got = loaded(load(directory, layout="fused", tp_size=size, tp_rank=rank))
        wanted = {
            f"{layer}.{fused}.{stored.suffix}": held(tensors, stored, f"{layer}.{fused}", rank, size)
            for layer in layers
            for fused in FUSED
            for stored in scheme
            if stored.fused != "nothing"
        }
        linear = {name: tensor for name, tensor in got.items() if any(f".{fused}." in name for fused in FUSED)}
        assert linear.keys() == wanted.keys()
        for name, tensor in wanted.items():
            require_equal(linear[name], tensor, f"{name} of rank {rank} of {size}")


def require_equal(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), what
    same = got.flatten().contiguous().view(torch.uint8) == wanted.flatten().contiguous().view(torch.uint8)
    assert same.all(), what


def without(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}
