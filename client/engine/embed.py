"""Owns embeddings with an encoder: one vector a text, the mean over its tokens, of length one.

sentence-transformers does the same for models with mean pooling and a final normalisation, such as all-MiniLM-L6-v2.
Not safe for threads: `service.py` has the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weightcached.client.engine.refusal import RequestRefused

if TYPE_CHECKING:
    from weightcached.client.engine.model import Recipe


class Encoder:
    """Embeds with one module. Holds it; owns no thread."""

    def __init__(self, recipe: Recipe, module: Any) -> None:
        self._tokenizer = recipe.tokenizer
        self._body = module.base_model  # a head, where there is one, is no part of an embedding
        limits = [recipe.tokenizer.model_max_length, getattr(recipe.config, "max_position_embeddings", None)]
        self.max_tokens = min(limit for limit in limits if limit)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """One float32 vector a text, in order. Blocks for as long as it takes.

        Texts of one call are padded to one length, so the last bits of a vector depend on its company. Raises
        RequestRefused for a text of more tokens than the model has positions: nothing is cut off silently.
        """
        import torch

        batch = self._tokenizer(list(texts), padding=True, truncation=False, return_tensors="pt").to(self._body.device)
        mask = batch["attention_mask"]
        longest = int(mask.sum(dim=1).max())
        if longest > self.max_tokens:
            raise RequestRefused(f"a text has {longest} tokens, the model takes {self.max_tokens}")
        with torch.inference_mode():
            hidden = self._body(**batch).last_hidden_state.float()
            weights = mask.unsqueeze(-1).float()
            mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
            vectors = torch.nn.functional.normalize(mean, dim=1)
        return [[float(value) for value in vector] for vector in vectors.tolist()]
