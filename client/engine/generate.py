"""Owns greedy generation with a decoder: text in, token ids and text out, and when the first token was there.

Deterministic: equal weights and an equal prompt give equal token ids. Not safe for threads: `service.py` has the lock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from weightcached.client.engine.refusal import RequestRefused

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from weightcached.client.engine.model import Recipe


@dataclass(frozen=True)
class Generation:
    """One answer. ``token_ids`` are the new ones only; seconds count from the call."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]
    first_token_s: float
    seconds: float


class _Clock:
    """A streamer (Transformers' word for who is told of tokens): notes when the first new one came."""

    def __init__(self) -> None:
        self.calls = 0
        self.first_token_at: float | None = None

    def put(self, value: Any) -> None:
        """Called with the prompt first, then with each new token."""
        self.calls += 1
        if self.calls == 2:
            self.first_token_at = time.monotonic()

    def end(self) -> None:
        pass


class Decoder:
    """Generates with one module. Holds it; owns no thread."""

    def __init__(self, recipe: Recipe, module: Any) -> None:
        self._tokenizer = recipe.tokenizer
        self._module = module
        self._context = int(getattr(recipe.config, "max_position_embeddings", 0)) or None
        self._stop_ids = _stop_ids(recipe)

    def generate(self, prompt: str, *, max_new_tokens: int) -> Generation:
        """Greedy continuation of ``prompt``, until a stop token or ``max_new_tokens``. Blocks for as long as it takes.

        Raises RequestRefused for a prompt without tokens, or longer, with its answer, than the model's context.
        """
        import torch

        began = time.monotonic()
        prompt_ids = self._tokenizer(prompt, return_tensors="pt")["input_ids"].to(self._module.device)
        self._check(prompt_ids.shape[1], max_new_tokens)
        clock = _Clock()
        with torch.inference_mode():
            ids = self._module.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                generation_config=self._config(max_new_tokens),
                streamer=clock,
            )
        new = ids[0, prompt_ids.shape[1] :].tolist()
        now = time.monotonic()
        return Generation(
            text=self._tokenizer.decode(new, skip_special_tokens=True),
            token_ids=tuple(new),
            prompt_tokens=prompt_ids.shape[1],
            finish_reason="stop" if new[-1] in self._stop_ids else "length",
            first_token_s=(clock.first_token_at or now) - began,
            seconds=now - began,
        )

    def _check(self, prompt_tokens: int, max_new_tokens: int) -> None:
        if prompt_tokens == 0:
            raise RequestRefused("the prompt has no tokens")
        if self._context is not None and prompt_tokens + max_new_tokens > self._context:
            raise RequestRefused(
                f"{prompt_tokens} tokens of prompt and {max_new_tokens} new ones do not fit in the model's "
                f"context of {self._context}"
            )

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        from transformers import GenerationConfig

        return GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(self._stop_ids) or None,
            pad_token_id=min(self._stop_ids, default=0),  # one prompt at a time: never used, only asked for
        )


def _stop_ids(recipe: Recipe) -> frozenset[int]:
    """Stop tokens: those of ``generation_config.json``, else the configuration's, else the tokenizer's."""
    from transformers import GenerationConfig

    found: Any = None
    if (recipe.directory / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(recipe.directory, local_files_only=True).eos_token_id
    if found is None:
        found = getattr(recipe.config, "eos_token_id", None)
    if found is None:
        found = recipe.tokenizer.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
