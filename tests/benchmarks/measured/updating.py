"""A model of Transformers generates on mapped weights, while its daemon loads other weights beside them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from weightcached.client.control import update
from weightcached.client.transformers import from_pretrained

_PROMPT = 16
_CONTEXT = 128
"""Tokens after which a sequence is begun anew, so that each costs about the same."""


def tokens_meanwhile(model: str, newer: str, runtime_dir: str, name: str, *, alone_s: float) -> dict[str, Any]:
    """Times at which tokens were there: for ``alone_s``, while ``newer`` is loaded and verified, and as long after."""
    where = {"runtime_dir": runtime_dir, "name": name}
    decoder = from_pretrained(AutoModelForCausalLM, model, weight_cache={"mode": "require", **where})
    generating = _Generating(decoder)
    generating.until(time.monotonic() + alone_s)  # what is read for the first time is not what is measured
    before = generating.until(time.monotonic() + alone_s)
    changed: list[float] = []

    def change() -> None:
        update(Path(newer), timeout_s=3600, runtime_dir=runtime_dir, name=name)
        changed.append(time.monotonic())

    changing = threading.Thread(target=change, name="update")
    began_s = time.monotonic()
    changing.start()
    during = generating.until_done(changing)
    changing.join()
    after = generating.until(time.monotonic() + alone_s)
    return {"before": before, "during": during, "after": after, "update_s": changed[0] - began_s}


class _Generating:
    """Greedy decoding, a token at a time."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._cache: Any = None
        self._next = torch.zeros((1, _PROMPT), dtype=torch.long)
        self._length = 0

    def until(self, end_s: float) -> float:
        """Tokens a second until then."""
        return self._rate(lambda: time.monotonic() >= end_s)

    def until_done(self, thread: threading.Thread) -> float:
        """Tokens a second while the thread runs."""
        return self._rate(lambda: not thread.is_alive())

    def _rate(self, over: Any) -> float:
        began_s, count = time.monotonic(), 0
        while not over():
            self._token()
            count += 1
        return count / (time.monotonic() - began_s)

    @torch.inference_mode()
    def _token(self) -> None:
        if self._length >= _CONTEXT:
            self._cache, self._next, self._length = None, torch.zeros((1, _PROMPT), dtype=torch.long), 0
        answer = self._decoder(input_ids=self._next, past_key_values=self._cache, use_cache=True)
        self._cache = answer.past_key_values
        self._length += self._next.shape[1]
        self._next = answer.logits[:, -1:].argmax(-1)
