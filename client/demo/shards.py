"""Owns the demo's third part: what a daemon saves where a file is not already what the engine wants.

Whole files in the page cache can be mapped as they are, and then disk costs next to nothing. A rank's fused shard, or a
quantized one, lies in no file: it has to be made, by every process anew, or once by the daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weightcached.client.demo.checkpoint import DemoCheckpoint
from weightcached.client.demo.processes import Child, Workshop

TIMING = "weightcached.client.demo.weight_set_timing"


@dataclass(frozen=True)
class Shard:
    """One rank's shard and where its daemon serves it."""

    label: str
    name: str
    tp_size: int
    tp_rank: int
    quantization: str

    @property
    def words(self) -> list[str]:
        """Options that daemon and engine have in common."""
        words = ["--layout", "fused", "--tp-size", str(self.tp_size), "--tp-rank", str(self.tp_rank)]
        return [*words, "--quantization", self.quantization, "--name", self.name]


SHARDS = (
    Shard("fused, TP 2, rank 0", "tp2", 2, 0, "none"),
    Shard("fused, TP 2, rank 1", "tp2", 2, 1, "none"),
    Shard("fused, fp8", "fp8", 1, 0, "fp8"),
)


@dataclass(frozen=True)
class Timing:
    """Seconds of one way to one shard: every tensor in hand, and every page touched too."""

    in_hand_s: float
    touched_s: float
    resident_bytes: int
    digest: str
    cached_fraction: float | None


@dataclass(frozen=True)
class ShardStory:
    """One shard from disk (cold, warm) and from its daemon."""

    shard: Shard
    cold: Timing
    warm: Timing
    daemon: Timing

    @property
    def agrees(self) -> bool:
        """Whether all three have the same names, dtypes, shapes and bytes."""
        return self.cold.digest == self.warm.digest == self.daemon.digest


def tell(workshop: Workshop, checkpoint: DemoCheckpoint, say: Callable[[str], None]) -> list[ShardStory]:
    """Times every shard, one daemon at a time; all processes are ended when it returns. Raises StepFailed."""
    stories = []
    for shard in SHARDS:
        say(f"WeightSet: {shard.label}")
        daemon = _daemon(workshop, checkpoint, shard)
        words = ["-m", TIMING, "--model", str(checkpoint.directory), *shard.words]
        timing = workshop.python("weight-set-timing", *words)
        found = timing.json_line()
        timing.finish()
        daemon.terminate()
        stories.append(ShardStory(shard, *(_timing(found[way]) for way in ("cold", "warm", "daemon"))))
    return stories


def _daemon(workshop: Workshop, checkpoint: DemoCheckpoint, shard: Shard) -> Child:
    log = f"daemon-{shard.name}-rank{shard.tp_rank}"
    daemon = workshop.weightcached(log, "serve", "--model", str(checkpoint.directory), *shard.words)
    workshop.wait_ready(daemon, shard.name, tp_size=shard.tp_size, tp_rank=shard.tp_rank)
    return daemon


def _timing(fields: dict[str, object]) -> Timing:
    return Timing(**{name: value for name, value in fields.items() if name != "tensors"})  # type: ignore[arg-type]
