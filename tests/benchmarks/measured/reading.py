"""One rank's load, and what it read: by the pipeline's account, and by the kernel's count for this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.protocol.config import build_config
from weightcached.protocol.memory import host


def rank(directory: str, tp_size: int, tp_rank: int) -> dict[str, Any]:
    """Layout ``fused``. ``asked`` is what system calls were to read, gaps included; ``kept`` became parameters."""
    config = build_config(Path(directory), layout="fused", tp_size=tp_size, tp_rank=tp_rank)
    before = _io()
    with open_checkpoint(directory) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config)
        segment = host.allocate(prepared.placement.nbytes, name="benchmark")
        figures = pipeline.load(checkpoint, prepared, segment).figures
    after = _io()
    return {
        "asked": dict(figures.requested),
        "kept": {kind: traffic.kept for kind, traffic in figures.traffic.items()},
        "rchar": after["rchar"] - before["rchar"],
        "read_bytes": after["read_bytes"] - before["read_bytes"],
    }


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
