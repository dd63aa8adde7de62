"""A program of the demo: times a WeightSet from disk and from the daemon, without any engine, in one process.

Run as ``python -m weightcached.client.demo.weight_set_timing``. Prints one line of JSON: for each way, seconds until
every tensor is in hand, seconds until every page was also touched, and a digest of all names and bytes. torch and the
loader are imported before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightcached.client.attach import Mode, attach
from weightcached.client.demo.page_cache import drop

WAYS: tuple[tuple[str, Mode], ...] = (("cold", "off"), ("warm", "off"), ("daemon", "require"))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m weightcached.client.demo.weight_set_timing")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--layout", default="fused")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--quantization", default="none")
    options = vars(parser.parse_args(argv))
    model = options.pop("model")
    _import_what_is_needed()
    files = sorted(model.glob("*.safetensors"))
    found: dict[str, Any] = {}
    for way, mode in WAYS:
        cached = drop(files) if way == "cold" else None
        found[way] = {**_measure(model, mode, options), "cached_fraction": cached}
    print(json.dumps(found))
    return 0


def _import_what_is_needed() -> None:
    import torch
    import xxhash  # noqa: F401

    import weightcached.client.fallback  # noqa: F401

    torch.zeros(1).sum()


def _measure(model: Path, mode: Mode, options: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    with attach(model, mode=mode, **options) as weights:
        tensors = {name: weights[name] for name in weights}
        in_hand = time.monotonic()
        for tensor in tensors.values():
            _touch(tensor)
        touched = time.monotonic()
        return {
            "in_hand_s": in_hand - began,
            "touched_s": touched - began,
            "resident_bytes": weights.resident_bytes,
            "tensors": len(tensors),
            "digest": _digest(tensors),
        }


def _touch(tensor: Any) -> None:
    """Reads one byte of every page."""
    import torch

    tensor.reshape(-1).view(torch.uint8)[::4096].sum()


def _digest(tensors: dict[str, Any]) -> str:
    """XXH3 of every name, dtype, shape and byte. Tensors of a WeightSet here are contiguous."""
    import torch
    from xxhash import xxh3_128

    digest = xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
