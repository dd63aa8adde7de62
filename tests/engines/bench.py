"""How long vLLM takes to start, with its own loader and with the cache: `make bench-engines`, nothing asserted.

    python -m tests.engines.bench [--gib G] [--tp-size N …] [--rounds R] [--dir DIR] [--json FILE]

A checkpoint of G GiB is written, and removed at the end; its files are in the page cache, which is the best case for
vLLM's loader. Each engine is a process of its own. The two kinds take turns; a figure is the median of its rounds, for
each rank. `bound` is from the attach's begin to the last parameter bound, without the module's construction between.
Exit codes: 0 all ran · 1 one did not.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import machine
from tests.benchmarks.outcome import GIB
from tests.engines import engine
from tests.engines.conftest import GENERATING
from tests.engines.generating import PAIR, serving
from tests.support.daemons import Daemon
from weightcached.client import attach
from weightcached.client.demo.checkpoint import make_checkpoint
from weightcached.protocol.text import table

PROMPT = list(range(1, 33))
TOKENS = 32
KV_CACHE_NBYTES = 256 << 20
OWN, CACHE = "vLLM's own", "the cache"
SECONDS = (
    "imports",
    "engine up",
    "own loader",
    "of it weights",
    "attach",
    "module",
    "bind",
    "post-processing",
    "bound",
    "first token",
    "start to first token",
)
COLUMNS = ("TP", "loader", "rank", *SECONDS, "tokens/s", "private MiB", "of weights")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.bench", description="Start vLLM with and without.")
    parser.add_argument("--gib", type=float, default=0.2)
    parser.add_argument("--tp-size", type=int, action="append", choices=(1, 2), help="default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where the checkpoint is written (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    given = parser.parse_args(argv)
    for key, value in machine.facts(argv).items():
        print(f"{key}: {value}", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weightcached-bench-", dir=given.dir) as folder:
        made = make_checkpoint(Path(folder, "model"), nbytes=int(given.gib * GIB))
        print(f"checkpoint: {made.nbytes / GIB:.2f} GiB, {made.tensors} tensors, {made.layers} layers\n", flush=True)
        try:
            for tp_size in given.tp_size or (1, 2):
                rows += _compared(made.directory, tp_size, rounds=given.rounds)
        except engine.EngineError as error:
            print(error, file=sys.stderr)
            return 1
    print("\n".join(table([COLUMNS, *(_cells(row) for row in rows)])))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))
    return 0


def _compared(model: Path, tp_size: int, *, rounds: int) -> list[dict[str, Any]]:
    """A row for each loader and rank."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="wcbench-", dir="/tmp") as folder:
        runtime_dir, absent = Path(folder, "run"), Path(folder, "absent")
        with serving(model, runtime_dir, tp_size=tp_size) as daemons:
            nbytes = [_settled(daemon) for daemon in daemons]
            for number in range(rounds):
                for loader, directory in ((OWN, absent), (CACHE, runtime_dir)):
                    print(f"TP {tp_size}, {loader}, round {number + 1} of {rounds} …", flush=True)
                    for rank, figures in enumerate(_started(model, directory, tp_size)):
                        figures["of weights"] = figures["private MiB"] * 2**20 / nbytes[rank]
                        found.setdefault((loader, rank), []).append(figures)
    return [
        {"TP": tp_size, "loader": loader, "rank": rank}
        | {name: statistics.median(one[name] for one in figures) for name in figures[0]}
        for (loader, rank), figures in found.items()
    ]


def _settled(daemon: Daemon) -> int:
    """Resident bytes of a daemon that somebody has attached to once: it has just loaded files that were just written,
    and whoever comes first has to prove by their digest what they are.
    """
    place = daemon.place
    with attach(
        daemon.model_dir,
        mode="require",
        runtime_dir=place.runtime_dir,
        cache_dir=place.runtime_dir / "digests",
        **daemon.options,
    ) as weights:
        return weights.resident_bytes


def _started(model: Path, runtime_dir: Path, tp_size: int) -> list[dict[str, float]]:
    """One engine, from the start of its process to its last token; figures of each rank."""
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp_size)))} if tp_size > 1 else {}
    arguments = {
        "model": str(model),
        "kv_cache_memory_bytes": KV_CACHE_NBYTES,
        "load_format": "weightcached",
        "model_loader_extra_config": {"runtime_dir": str(runtime_dir), "cache_dir": str(runtime_dir / "digests")},
        **(PAIR if tp_size > 1 else {}),
    }
    began = time.monotonic()
    with engine.running(engine.WHOLE, {**GENERATING, "VLLM_LOGGING_LEVEL": "INFO", **binding}) as vllm:
        imported = time.monotonic() - began
        up = vllm.ask(do="start", **arguments)
        first = vllm.ask(do="say", prompts=[PROMPT], max_tokens=1)["seconds"]
        to_first = time.monotonic() - began
        more = vllm.ask(do="say", prompts=[PROMPT], max_tokens=TOKENS)["seconds"]
        workers, log = up["workers"], vllm.log()
        vllm.ask(do="end")
    together = {"imports": imported, "engine up": up["seconds"], "first token": first, "tokens/s": TOKENS / more}
    together["start to first token"] = to_first
    return [together | _of_rank(worker["report"], log) for worker in workers]


def _of_rank(report: Mapping[str, Any], log: str) -> dict[str, float]:
    seconds: dict[str, float] = report["seconds"]
    private = {"private MiB": report["nbytes_private"] / 2**20}
    if report["source"] == "disk":
        weights = max(map(float, re.findall(r"Loading weights took ([0-9.]+) seconds", log)))
        module = max(map(float, re.findall(r"Initializing model took ([0-9.]+) seconds", log)))
        own = seconds["vLLM's own loader"]
        post = own - weights - module
        return {"own loader": own, "of it weights": weights, "module": module, "post-processing": post, **private}
    named = {name: seconds[name] for name in ("attach", "module", "bind", "post-processing")}
    return {**named, "bound": seconds["attach"] + seconds["bind"], **private}


def _cells(row: Mapping[str, Any]) -> list[str]:
    def cell(name: str) -> str:
        value = row.get(name)
        if value is None:
            return "-"
        if name in SECONDS:
            return f"{value:.3f}"
        if name == "of weights":
            return f"{value:.2%}"
        return f"{value:.1f}" if isinstance(value, float) else str(value)

    return [cell(name) for name in COLUMNS]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
