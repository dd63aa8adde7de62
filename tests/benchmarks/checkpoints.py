"""Checkpoints to measure with: shapes of real models, any number of tensors, written piece by piece.

Random bytes where reading is measured; *sparse* files (holes, which read as zeros) where only what becomes of them in
memory matters: loaded, they are as many real pages as any other checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.outcome import MIB
from tests.support.checkpoints import INDEX, ITEMSIZES, tiny_shapes

_PIECE_BYTES = 16 * MIB


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written. ``code`` is safetensors' dtype name."""

    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.code]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: ``file`` is a name in the checkpoint's folder, ``offset`` counts from its start."""

    tensor: Tensor
    file: str
    offset: int


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk. ``nbytes`` counts tensors' bytes, not headers."""

    directory: Path
    places: tuple[Place, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.directory / name for name in sorted({place.file for place in self.places}))

    @property
    def nbytes(self) -> int:
        return sum(place.tensor.nbytes for place in self.places)


def many_tensors(directory: Path, *, count: int, nbytes: int) -> Written:
    """``count`` tensors of together ``nbytes``, nearly; 40 % bf16, 40 % fp8, 20 % int32. Sparse. Layout ``hf`` only."""
    codes = ("BF16", "F8_E4M3", "BF16", "F8_E4M3", "I32")
    width = 64
    tensors = []
    for number in range(count):
        code = codes[number % len(codes)]
        rows = max(1, nbytes // count // (width * ITEMSIZES[code]))
        tensors.append(Tensor(f"model.layers.{number // 10}.block_{number % 10}.proj.weight", code, (rows, width)))
    config = {"architectures": ["ManyTensors"], "model_type": "many-tensors"}
    return write(directory, config, {"model.safetensors": tensors}, sparse=True)


def dense_decoder(directory: Path, *, nbytes: int, files: int) -> Written:
    """A Llama with the shapes of Llama 3.2 1B, a vocabulary of 32,000, and as many layers as ``nbytes`` asks for."""
    config = _llama(hidden=2048, inner=8192, heads=32, kv_heads=8, vocabulary=32000, layers=1)
    one = sum(math.prod(shape) * 2 for shape in tiny_shapes(config).values())
    two = sum(math.prod(shape) * 2 for shape in tiny_shapes({**config, "num_hidden_layers": 2}).values())
    layers = max(1, round((nbytes - one) / (two - one)) + 1)
    return write_dense(directory, {**config, "num_hidden_layers": layers}, files=files)


def wide_decoder(directory: Path, *, layers: int, inner: int, vocabulary: int) -> Written:
    """A Llama of hidden size 8192 with the attention of Llama 70B (64 heads, 8 key and value heads)."""
    config = _llama(hidden=8192, inner=inner, heads=64, kv_heads=8, vocabulary=vocabulary, layers=layers)
    return write_dense(directory, config, files=1)


def _llama(*, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


def write_dense(directory: Path, config: Mapping[str, Any], *, files: int) -> Written:
    """A checkpoint of a dense family in bf16, random bytes, over ``files`` files.

    As libraries write them: layer after layer over the files, and sorted by name within each.
    """
    tensors = [Tensor(name, "BF16", shape) for name, shape in tiny_shapes(config).items()]
    share = sum(tensor.nbytes for tensor in tensors) / files
    chosen: dict[str, list[Tensor]] = {}
    before = 0
    for tensor in tensors:
        number = min(files, int(before / share) + 1)
        chosen.setdefault(f"model-{number:05}-of-{files:05}.safetensors", []).append(tensor)
        before += tensor.nbytes
    by_name = {file: sorted(some, key=lambda tensor: tensor.name) for file, some in chosen.items()}
    return write(directory, config, by_name, sparse=False)


def write(
    directory: Path, config: Mapping[str, Any], files: Mapping[str, Sequence[Tensor]], *, sparse: bool
) -> Written:
    """Writes ``config.json``, the files, and an index where they are several."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    random = np.random.default_rng(20)
    places: list[Place] = []
    for name, tensors in files.items():
        header, offsets = _header(tensors)
        places += [Place(tensor, name, offset) for tensor, offset in zip(tensors, offsets, strict=True)]
        nbytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        with open(directory / name, "wb") as file:
            file.write(header)
            while not sparse and (missing := nbytes - file.tell()) > 0:
                file.write(_finite_bf16(random, min(_PIECE_BYTES, missing)))
            file.truncate(nbytes)
            file.flush()
            os.fsync(file.fileno())  # or the first who opens it to load pays for that
    if len(files) > 1:
        weight_map = {place.tensor.name: place.file for place in places}
        total = sum(place.tensor.nbytes for place in places)
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return Written(directory, tuple(places))


def _finite_bf16(random: np.random.Generator, nbytes: int) -> bytes:
    """Of magnitudes below two: a quantizer refuses what is not finite."""
    words = np.frombuffer(random.bytes(nbytes + nbytes % 2), np.uint16)
    return (words & 0xBFFF).tobytes()[:nbytes]


def _header(tensors: Sequence[Tensor]) -> tuple[bytes, list[int]]:
    """The file's head, and each tensor's absolute offset."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, relative = 0, []
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        relative.append(offset)
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, [len(header) + offset for offset in relative]
