"""The checkpoints that a group changes between: one configuration, and in each every tensor has other bytes.

Owns the directories and the truth about them: which digest a parameter of a rank has in which variant. Cut and fused by
code that is not the product's, for layout ``fused`` of a small Llama whose sizes divide evenly.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from tests.support.checkpoints import tiny_llama
from weightcached.protocol.places import host_device

HEAD = "lm_head.weight"
"""What a partial push changes; the rest is the body."""
SERVED = ("a", "b")
"""What daemons load; the first at their start."""
PUSHED = ("c", "d")
"""What trainers push whole."""
HEADS = ("e", "f")
"""Of which trainers push the head alone, onto any body."""
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
_WEIGHTS = "model.safetensors"

Tensors = dict[str, "np.ndarray"]
Truth = dict[str, dict[str, dict[str, str]]]
"""Device of a rank → parameter → digest → variant."""


class Variants:
    """In ``folder``; ``truth`` is a JSON file (:data:`Truth`)."""

    def __init__(self, folder: Path, *, size: int) -> None:
        folder.mkdir()
        self._folder = folder
        truth: Truth = {host_device(tp_size=size, tp_rank=rank): {} for rank in range(size)}
        first = tiny_llama(self.directory(SERVED[0]), **_SHAPE)
        for number, variant in enumerate((*SERVED, *PUSHED, *HEADS)):
            if number:
                shutil.copytree(first, self.directory(variant))
                _flip_signs(self.directory(variant) / _WEIGHTS, every=number)
            tensors = read_tensors(self.directory(variant))
            for rank in range(size):
                known = truth[host_device(tp_size=size, tp_rank=rank)]
                for name, values in _of_rank(tensors, rank=rank, size=size).items():
                    known.setdefault(name, {})[xxh3_128_hexdigest(values.tobytes())] = variant
        self.truth = folder / "truth.json"
        self.truth.write_text(json.dumps(truth))

    def directory(self, variant: str) -> Path:
        return self._folder / variant


def label(variants: dict[str, str | None]) -> str | None:
    """What a whole set of parameters is, ``body+head``, from the variant that each is of; ``None`` for a mixture."""
    body = {variant for name, variant in variants.items() if name != HEAD}
    head = variants.get(HEAD)
    if len(body) != 1 or None in body or head is None or not (body == {head} or head in HEADS):
        return None
    return f"{body.pop()}+{head}"


def _flip_signs(path: Path, *, every: int) -> None:
    data = bytearray(path.read_bytes())
    (header_nbytes,) = struct.unpack_from("<Q", data)
    numbers = np.frombuffer(data, np.uint16, offset=8 + header_nbytes)
    numbers[::every] ^= 0x8000
    path.write_bytes(data)


def read_tensors(directory: Path) -> Tensors:
    """Every tensor of a checkpoint of one file, as bits."""
    data = (directory / _WEIGHTS).read_bytes()
    (header_nbytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_nbytes])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*(8 + header_nbytes + offset for offset in one["data_offsets"]))], np.uint16)
        .reshape(one["shape"])
        for name, one in header.items()
    }  # fmt: skip


def _of_rank(tensors: Tensors, *, rank: int, size: int) -> Tensors:
    def rows(name: str) -> np.ndarray:
        return np.split(tensors[name], size)[rank]

    made: Tensors = {}
    for name, values in tensors.items():
        if values.ndim == 1:
            made[name] = values
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            made[name] = np.split(values, size, axis=1)[rank]
        elif ".q_proj." in name:
            parts = [rows(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            made[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
        elif ".gate_proj." in name:
            parts = [rows(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
            made[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(parts)
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            made[name] = rows(name)
    return made
