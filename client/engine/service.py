"""Owns one loaded model as a service: one lock around it, what it has answered, and the state of its weights.

Knows nothing of HTTP. Its methods may be called from any thread; answers are made one at a time, in the order in which
threads get the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from weightcached.client.barrier import Barrier
from weightcached.client.engine.embed import Encoder
from weightcached.client.engine.following import Following
from weightcached.client.engine.generate import Decoder, Generation
from weightcached.client.engine.refusal import RequestRefused
from weightcached.client.transformers.switching import swap_in

if TYPE_CHECKING:
    from weightcached.client.engine.model import Recipe
    from weightcached.client.following import Published
    from weightcached.client.swap import Swapped
    from weightcached.client.weights import WeightSet


class Service:
    """Answers with one module. ``weights`` (``None`` where Transformers loaded them) are only asked about."""

    def __init__(self, recipe: Recipe, module: Any, weights: WeightSet | None, *, mode: str) -> None:
        self.kind = recipe.kind
        self.following: Following | None = None
        """Who switches to what the daemon publishes, if anybody does."""
        self._module = module
        self._barrier = Barrier() if weights is None else weights.barrier
        self._recipe = recipe
        self._weights = weights
        self._mode = mode
        self._dtype = str(module.dtype).removeprefix("torch.")
        self._decoder = Decoder(recipe, module) if recipe.kind == "decoder" else None
        self._encoder = Encoder(recipe, module) if recipe.kind == "encoder" else None
        self._model = threading.Lock()
        self._counts = threading.Condition()
        self._in_flight = 0
        self._answered = 0

    def generate(self, prompt: str, *, max_new_tokens: int) -> Generation:
        """Blocks until the lock is free and the answer made. Raises RequestRefused."""
        if self._decoder is None:
            raise RequestRefused("this model is an encoder: it has embeddings, POST /embed", status=HTTPStatus.CONFLICT)
        with self._answering():
            return self._decoder.generate(prompt, max_new_tokens=max_new_tokens)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Blocks until the lock is free and the vectors made. Raises RequestRefused."""
        if self._encoder is None:
            raise RequestRefused("this model is a decoder: it has text, POST /generate", status=HTTPStatus.CONFLICT)
        with self._answering():
            return self._encoder.embed(texts)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        with self._counts:
            self._in_flight += 1
        try:
            with self._model, self._barrier.reading("an answer"):
                yield
            with self._counts:
                self._answered += 1
        finally:
            with self._counts:
                self._in_flight -= 1

    def switch_to(self, published: Published, *, timeout_s: float) -> Swapped:
        """Use what was published from the next answer on; those under way are finished first, within ``timeout_s``.

        Nothing is to be dropped here: caches live for one answer. Raises what staging and swapping raise.
        """
        weights = self._weights
        if weights is None:
            raise ValueError("there are no weights of a daemon to switch")
        with (
            weights.stage(generation=published.generation, timeout_s=timeout_s) as staged,
            self._barrier.stopped(timeout_s=timeout_s) as stopped,
        ):
            return swap_in(self._module, weights, staged, stopped)

    def status(self) -> dict[str, Any]:
        """What `/status` shows: model, weights with their lease, and counts. Never waits for an answer under way."""
        with self._counts:
            counts = {"in_flight": self._in_flight, "answered": self._answered}
        return {
            "model": str(self._recipe.directory),
            "architecture": self._recipe.model_class.__name__,
            "kind": self.kind,
            "dtype": self._dtype,
            "weight_cache_mode": self._mode,
            "weights": {**self.weights_fields(), "lease": self._lease_fields(), "following": self._following_fields()},
            "requests": counts,
        }

    def weights_fields(self) -> dict[str, Any]:
        """Where the weights came from: ``source`` is ``daemon``, ``disk`` (fallback) or ``transformers`` (mode off)."""
        if self._weights is None:
            return {"source": "transformers", "version": None, "generation": None, "resident_bytes": None}
        return {
            "source": self._weights.source,
            "version": self._weights.version,
            "generation": self._weights.generation,
            "resident_bytes": self._weights.resident_bytes,
        }

    def _following_fields(self) -> dict[str, Any] | None:
        return None if self.following is None else self.following.status()

    def _lease_fields(self) -> dict[str, str | int | None] | None:
        """The lease's state with the reason unless it is ``connected``, what stands in the way of resuming it, and how
        often it was resumed; ``None`` for weights from disk.

        An engine whose daemon is gone serves on from the memory it has mapped.
        """
        lease = None if self._weights is None else self._weights.lease
        if lease is None:
            return None
        return {
            "state": lease.state,
            "reason": lease.reason,
            "obstacle": lease.obstacle,
            "losses": lease.losses,
            "resumes": lease.resumes,
        }
