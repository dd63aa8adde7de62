"""The checkpoints of a run: written, described byte by byte, and taken away, re-stamped or replaced by faults.

Owns one directory and the truth about it: XXH3-128 of each tensor's bytes, from the files themselves by code that is
not the product's. In layout ``hf`` with one rank these are the bytes that an engine has to see.
"""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from tests.support.checkpoints import tiny_llama

_WEIGHTS = "model.safetensors"


class Checkpoint:
    """``directory`` is what daemons and engines are told; ``truth`` a JSON file: name → digest."""

    def __init__(self, directory: Path, **shape: int) -> None:
        overrides: dict[str, Any] = dict(shape)
        self.directory = tiny_llama(directory, **overrides)
        self.truth = directory.with_suffix(".truth")
        self.truth.write_text(json.dumps(_digests((directory / _WEIGHTS).read_bytes())))
        self._aside = directory.with_suffix(".away")
        self._other = directory.with_suffix(".other")
        other = bytearray((directory / _WEIGHTS).read_bytes())
        other[-1] ^= 1
        self._other.write_bytes(other)

    def vanish(self) -> None:
        self.directory.rename(self._aside)

    def come_back(self) -> None:
        self._aside.rename(self.directory)

    def restamp(self, random: random.Random) -> None:
        """Other times or other permissions, the same bytes."""
        weights = self.directory / _WEIGHTS
        if random.random() < 0.5:
            os.utime(weights)
        else:
            weights.chmod(0o640 if weights.stat().st_mode & 0o004 else 0o644)

    def swap(self) -> None:
        """The directory has other weights, of the same names and shapes; or, the second time, its own again."""
        between = self.directory / "between"
        (self.directory / _WEIGHTS).rename(between)
        self._other.rename(self.directory / _WEIGHTS)
        between.rename(self._other)


def _digests(data: bytes) -> dict[str, str]:
    (header_nbytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_nbytes])
    header.pop("__metadata__", None)
    digests = {}
    for name, tensor in header.items():
        start, end = (8 + header_nbytes + offset for offset in tensor["data_offsets"])
        digests[name] = xxh3_128_hexdigest(data[start:end])
    return digests
