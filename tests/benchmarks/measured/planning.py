"""Plans of a checkpoint, and the manifest of one that is loaded: how long they take, and how much memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.protocol.config import build_config
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory import host


def planned(model: str, options: dict[str, Any], *, rounds: int) -> dict[str, Any]:
    """Seconds of the processor for each round, and the peak of the process's memory after the first."""
    config = build_config(Path(model), **options)
    seconds: list[float] = []
    peak_nbytes = tensors = 0
    for _ in range(rounds):
        began_s = time.process_time()
        with open_checkpoint(Path(model)) as checkpoint:
            tensors = len(checkpoint.tensors)
            pipeline.prepare(checkpoint, config)
            seconds.append(time.process_time() - began_s)
        peak_nbytes = peak_nbytes or _peak_nbytes()
    return {"seconds": seconds, "peak_nbytes": peak_nbytes, "tensors": tensors}


def decoded(model: str, *, rounds: int) -> dict[str, Any]:
    """Seconds of the processor to decode the manifest of the checkpoint, loaded in layout ``hf``."""
    config = build_config(Path(model), layout="hf", tp_size=1, tp_rank=0)
    with open_checkpoint(Path(model)) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config)
        with OwnedFds([host.allocate(prepared.placement.nbytes, name="plan")]) as fds:
            loaded = pipeline.load(checkpoint, prepared, fds[0])
            manifest = pipeline.encode(
                loaded, prepared, generation="0" * 32, version="v", receipts_version="r", digest=None
            )
    del prepared, loaded
    seconds = []
    for _ in range(rounds):
        began_s = time.process_time()
        rows = len(Manifest.decode(manifest))
        seconds.append(time.process_time() - began_s)
    return {"seconds": seconds, "rows": rows, "nbytes": len(manifest)}


def _peak_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10
