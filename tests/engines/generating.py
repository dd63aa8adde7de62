"""What the tests of a whole engine have in common: its arguments, what it is asked, and daemons for all its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.engine import Engine, EngineError
from tests.support import daemons

KV_CACHE_NBYTES = 64 << 20
PROMPTS = [[1, 2, 3, 4, 5], [100, 90, 80], [7] * 20]
TOKENS = 16

PAIR: Mapping[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def of_vllm(model: Path, **more: Any) -> dict[str, Any]:
    """Arguments of an engine with vLLM's own loader, its matrices not packed: what ours is compared with."""
    return {"model": str(model), "kv_cache_memory_bytes": KV_CACHE_NBYTES, "packing": False, **more}


def with_cache(
    model: Path, runtime_dir: Path, *, mode: str = "require", options: Mapping[str, Any] = {}, **more: Any
) -> dict[str, Any]:
    """Arguments of an engine with weights of the daemons in ``runtime_dir``."""
    extra = {"weight_cache_mode": mode, "runtime_dir": str(runtime_dir), **options}
    extra.setdefault("cache_dir", str(runtime_dir / "digests"))
    return {
        "model": str(model),
        "kv_cache_memory_bytes": KV_CACHE_NBYTES,
        "load_format": "weightcached",
        "model_loader_extra_config": extra,
        **more,
    }


def share_of_memory(nbytes: int) -> float:
    """As ``gpu_memory_utilization``: on a CPU vLLM takes that of the memory of the first processor's node."""
    node = Path("/sys/devices/system/node/node0/meminfo")
    found = re.search(r"MemTotal: *(\d+) kB", node.read_text()) if node.exists() else None
    return nbytes / (psutil.virtual_memory().total if found is None else int(found[1]) << 10)


def started(engine: Engine, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Start an engine; what each of its workers says of itself. Raises EngineError."""
    return engine.ask(do="start", **arguments)["workers"]


def said(engine: Engine, *, adapter: Path | None = None) -> list[list[int]]:
    """What the engine says to the prompts."""
    request = {} if adapter is None else {"adapter": str(adapter)}
    return engine.ask(do="say", prompts=PROMPTS, max_tokens=TOKENS, **request)["tokens"]


def ended(engine: Engine) -> None:
    engine.ask(do="end")


def said_by(engine: Engine, arguments: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Start, ask, end: what the workers and what the engine said."""
    workers = started(engine, arguments)
    tokens = said(engine)
    ended(engine)
    return workers, tokens


def said_without_cache(engine: Engine, model: Path) -> list[list[int]]:
    """What it says with vLLM's own loader. Skips where vLLM itself has no kernel for such weights on this processor."""
    try:
        return said_by(engine, of_vllm(model))[1]
    except EngineError as error:
        reason = str(error).strip().splitlines()[-1]
        if "'_C' object has no attribute" in reason:
            pytest.skip(f"vLLM has no kernel for it on this processor: {reason}")
        raise


@contextmanager
def serving(
    model: Path,
    runtime_dir: Path,
    *,
    tp_size: int = 1,
    ranks: Sequence[int] | None = None,
    whole_experts: bool = False,
    **options: Any,
) -> Iterator[list[daemons.Daemon]]:
    """A daemon in layout `fused`, ready, for each rank or for those of ``ranks``."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                daemons.daemon(
                    model,
                    runtime_dir,
                    layout="fused",
                    tp_size=tp_size,
                    tp_rank=rank,
                    **({"ep_size": tp_size, "ep_rank": rank} if whole_experts else {}),
                    **options,
                )
            )
            for rank in (range(tp_size) if ranks is None else ranks)
        ]
        for daemon in started:
            daemon.wait_until("ready")
        yield started
