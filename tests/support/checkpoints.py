"""Checkpoints for tests: written byte by byte, whole or broken in a chosen way. No safetensors library is involved.

`make_checkpoint(dir, case)` writes an oracle case, `tiny_llama(dir, **overrides)` a small model of any size,
`write_safetensors(path, tensors, …)` one file whose header may lie. Bytes of a tensor follow from its name alone, so a
slice that lands in the wrong place shows.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightcached.protocol.content import open_weights, take_receipts, weight_files

ORACLE = Path(__file__).resolve().parent.parent / "oracle"
ORACLE_CASES = ("llama", "llama-tied", "llama-sharded", "mixtral", "phi3", "qwen2", "qwen3")
"""All of its cases."""

INDEX = "model.safetensors.index.json"
ITEMSIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1, "I8": 1, "I32": 4, "I64": 8, "BOOL": 1, "F8_E4M3": 1}


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it will stand in a file. ``data`` should have the bytes that code and shape imply; tests may lie."""

    code: str
    shape: tuple[int, ...]
    data: bytes


def bf16_bits(name: str, shape: Iterable[int]) -> np.ndarray:
    """The oracle's bytes of tensor ``name``, as uint16 (see `oracle/make_checkpoints.py`)."""
    shape = tuple(shape)
    key = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u8")
    random = np.random.Generator(np.random.Philox(key=key))
    u = random.integers(0, 1 << 16, size=math.prod(shape), dtype=np.uint16)
    is_norm = len(shape) == 1 and name.endswith(".weight")
    exponent = np.full_like(u, 127) if is_norm else (118 + ((u >> 7) & 3)).astype(np.uint16)
    return ((u & 0x8000) | (exponent << 7) | (u & 0x7F)).reshape(shape)


def raw_tensor(name: str, shape: Iterable[int], code: str = "BF16") -> RawTensor:
    """A tensor whose bytes follow from its name: the oracle's values as BF16, F16, F32 or F64, else zeros and ones."""
    shape = tuple(shape)
    bits = bf16_bits(name, shape)
    if code == "BF16":
        return RawTensor(code, shape, bits.tobytes())
    if code in ("F16", "F32", "F64"):
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        dtype = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[code]
        return RawTensor(code, shape, values.astype(dtype).tobytes())
    nbytes = math.prod(shape) * ITEMSIZES[code]
    return RawTensor(code, shape, (bf16_bits(name, (nbytes,)) & 1).astype(np.uint8).tobytes())


def write_safetensors(
    path: Path,
    tensors: Mapping[str, RawTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    edit_header: Callable[[dict[str, Any]], None] | None = None,
    raw_header: bytes | None = None,
    header_nbytes: int | None = None,
    extra: bytes = b"",
    drop_bytes: int = 0,
) -> None:
    """Write one safetensors file. Without the last five arguments it is a good one.

    ``edit_header`` may change the parsed header before it is encoded; ``raw_header`` replaces its encoded bytes;
    ``header_nbytes`` is the length that the file claims; ``extra`` is appended and ``drop_bytes`` cut off at the end.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    if edit_header is not None:
        edit_header(header)
    text = raw_header if raw_header is not None else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8) if raw_header is None else b""
    claimed = len(text) if header_nbytes is None else header_nbytes
    data = struct.pack("<Q", claimed) + text + b"".join(tensor.data for tensor in tensors.values()) + extra
    path.write_bytes(data[: len(data) - drop_bytes])


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    files: Mapping[str, Mapping[str, RawTensor]],
    *,
    index: Mapping[str, str] | None = None,
) -> Path:
    """Write ``config.json`` and the files, with the given index, or one where files are several. Returns the folder."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    for file, tensors in files.items():
        write_safetensors(directory / file, tensors, metadata={"format": "pt"})
    if index is None and len(files) > 1:
        index = {name: file for file, tensors in files.items() for name in tensors}
    if index is not None:
        total = sum(len(tensor.data) for tensors in files.values() for tensor in tensors.values())
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return directory


def make_checkpoint(directory: Path, case: str) -> Path:
    """Write the oracle case ``case``, byte for byte as the oracle's own script does. Returns ``directory``."""
    config = json.loads((ORACLE / case / "config.json").read_text())
    listed = json.loads((ORACLE / case / "tensors.json").read_text())
    files = {
        file: {name: raw_tensor(name, shape, code) for name, (code, shape) in tensors.items()}
        for file, tensors in listed.items()
    }
    return write_checkpoint(directory, config, files)


TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """``config.json`` of a very small model. ``architecture`` names another family; ``None`` removes a key."""
    architecture = overrides.pop("architecture", "LlamaForCausalLM")
    merged = {**TINY, "architectures": [architecture], **overrides}
    merged["model_type"] = architecture.removesuffix("ForCausalLM").lower()
    return {key: value for key, value in merged.items() if value is not None}


def tiny_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape of the checkpoint that Transformers would write for a config of the dense families."""
    family = config["architectures"][0].removesuffix("ForCausalLM")
    hidden, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, config.get("num_key_value_heads", heads) * head
    biased = bool(config.get("attention_bias")) and family in ("Llama", "Qwen3")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for projection, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            shapes[f"{at}.self_attn.{projection}.weight"] = (rows, hidden)
            if biased or family == "Qwen2":
                shapes[f"{at}.self_attn.{projection}.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, queries)
        if biased:
            shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        if family == "Qwen3":
            shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (head,)
        for projection, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            shapes[f"{at}.mlp.{projection}.weight"] = shape
            if config.get("mlp_bias") and family == "Llama":
                shapes[f"{at}.mlp.{projection}.bias"] = shape[:1]
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def settled(directory: Path) -> Path:
    """``directory``, once its files have been lying there for two seconds: equal receipts prove equal content then."""
    with open_weights(weight_files(directory)) as weights:
        receipts = take_receipts(weights)
    # What is waited for is the clock: only time makes a receipt old.
    time.sleep(max(0.0, (receipts.settled_at_ns - time.time_ns()) / 1e9))
    return directory


def tiny_llama(directory: Path, *, code: str = "BF16", shards: int = 1, **overrides: Any) -> Path:
    """Write a very small checkpoint of a dense family (Llama unless ``architecture=`` says otherwise).

    ``overrides`` replace keys of ``config.json`` (``None`` removes one); ``code`` is every tensor's dtype; with
    ``shards`` over one the tensors are dealt over that many files with an index. Returns ``directory``.
    """
    config = tiny_config(**overrides)
    tensors = {name: raw_tensor(name, shape, code) for name, shape in tiny_shapes(config).items()}
    if shards == 1:
        return write_checkpoint(directory, config, {"model.safetensors": tensors})
    files: dict[str, dict[str, RawTensor]] = {}
    for position, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{position % shards + 1:05}-of-{shards:05}.safetensors"
        files.setdefault(file, {})[name] = tensor
    return write_checkpoint(directory, config, files)
