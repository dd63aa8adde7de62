"""Sizes of one model, read from its ``config.json`` under the words that the tables use.

Pure. A size that is missing or impossible is an error here, before any rule computes with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weightcached.protocol.errors import ModelConfigError
from weightcached.protocol.text import shown

Size = Literal["hidden", "intermediate", "vocabulary", "layers", "heads", "kv_heads", "head", "queries"]
"""``head`` is one head's size; ``queries`` is ``heads × head``, what the output projection takes in."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Every size a table may name, and the config's switches."""

    sizes: Mapping[Size, int]
    config: Mapping[str, Any]

    def size(self, name: Size) -> int:
        return self.sizes[name]

    def switch(self, name: str) -> bool:
        """A boolean of ``config.json``; absent or null is false. Raises ModelConfigError when it is neither."""
        value = self.config.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ModelConfigError(
                f"config.json's {name} is not a boolean", expected="true or false", found=shown(value)
            )
        return value


def shape_of(config: Mapping[str, Any], defaults: Mapping[str, int]) -> ModelShape:
    """The sizes that ``config`` (``config.json``) states. ``defaults``: what Transformers takes for an absent key."""

    def positive(key: str) -> int:
        value = config.get(key, defaults.get(key))
        if type(value) is not int or value <= 0:
            raise ModelConfigError(
                f"config.json's {key} is unusable", expected="a positive integer", found=shown(value)
            )
        return value

    def positive_or(key: str, fallback: int) -> int:
        return fallback if config.get(key, defaults.get(key)) is None else positive(key)

    hidden, heads = positive("hidden_size"), positive("num_attention_heads")
    head = positive_or("head_dim", hidden // heads)
    if config.get("head_dim", defaults.get("head_dim")) is None and hidden % heads:
        raise ModelConfigError(
            "config.json has no head_dim, and hidden_size does not divide into the heads",
            expected=f"a multiple of {heads}",
            found=hidden,
        )
    return ModelShape(
        sizes={
            "hidden": hidden,
            "intermediate": positive("intermediate_size"),
            "vocabulary": positive("vocab_size"),
            "layers": positive("num_hidden_layers"),
            "heads": heads,
            "kv_heads": positive_or("num_key_value_heads", heads),
            "head": head,
            "queries": heads * head,
        },
        config=config,
    )
