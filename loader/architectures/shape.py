"""Sizes of one model, read from its ``config.json`` under the words that the tables use.

Pure. A size that is missing or impossible is an error here, before any rule computes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weightcached.protocol.errors import ModelConfigError
from weightcached.protocol.text import shown

Size = Literal[
    "hidden",
    "intermediate",
    "vocabulary",
    "layers",
    "heads",
    "kv_heads",
    "head",
    "queries",
    "experts",
    "expert_intermediate",
    "shared_intermediate",
]
"""``head`` is one head's size; ``queries`` is ``heads × head``, what the output projection takes in. The last three are
those of tables that give a rule for them."""

SizeRule = Callable[["ModelShape"], int]
"""How a table reads a size that not every model has."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Every size a table may name, and the config's switches."""

    sizes: Mapping[Size, int]
    config: Mapping[str, Any]
    defaults: Mapping[str, int] = field(default_factory=dict)
    """What Transformers takes for an absent key."""
    rules: Mapping[Size, SizeRule] = field(default_factory=dict)

    def size(self, name: Size) -> int:
        """Raises ModelConfigError for a size by rule that ``config.json`` does not give."""
        return self.sizes[name] if name in self.sizes else self.rules[name](self)

    def number(self, *keys: str) -> int:
        """The positive integer under the first of ``keys`` that is there. Raises ModelConfigError."""
        key = next((key for key in keys if key in self.config), keys[0])
        return positive(self.config, self.defaults, key)

    def count(self, key: str) -> int:
        """The integer, 0 or more, under ``key``; null is 0, as is an absent one without a default. Raises
        ModelConfigError.
        """
        value = self.config.get(key, self.defaults.get(key))
        if value is None:
            return 0
        if type(value) is not int or value < 0:
            raise ModelConfigError(
                f"config.json's {key} is unusable", expected="an integer, 0 or more", found=shown(value)
            )
        return value

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


def named(*keys: str) -> SizeRule:
    """The size under the first of ``keys`` that is there: spellings of one thing."""
    return lambda model: model.number(*keys)


def product(first: str, second: str) -> SizeRule:
    """The product of two keys."""
    return lambda model: model.number(first) * model.number(second)


def positive(config: Mapping[str, Any], defaults: Mapping[str, int], key: str) -> int:
    """The positive integer under ``key``, or its default. Raises ModelConfigError."""
    value = config.get(key, defaults.get(key))
    if type(value) is not int or value <= 0:
        raise ModelConfigError(f"config.json's {key} is unusable", expected="a positive integer", found=shown(value))
    return value


def shape_of(
    config: Mapping[str, Any], defaults: Mapping[str, int], rules: Mapping[Size, SizeRule] | None = None
) -> ModelShape:
    """The sizes that ``config`` (``config.json``) states. ``defaults``: what Transformers takes for an absent key."""

    def required(key: str) -> int:
        return positive(config, defaults, key)

    def optional(key: str, fallback: int) -> int:
        return fallback if config.get(key, defaults.get(key)) is None else required(key)

    hidden, heads = required("hidden_size"), required("num_attention_heads")
    head = optional("head_dim", hidden // heads)
    if config.get("head_dim", defaults.get("head_dim")) is None and hidden % heads:
        raise ModelConfigError(
            "config.json has no head_dim, and hidden_size does not divide into the heads",
            expected=f"a multiple of {heads}",
            found=hidden,
        )
    return ModelShape(
        sizes={
            "hidden": hidden,
            "intermediate": required("intermediate_size"),
            "vocabulary": required("vocab_size"),
            "layers": required("num_hidden_layers"),
            "heads": heads,
            "kv_heads": optional("num_key_value_heads", heads),
            "head": head,
            "queries": heads * head,
        },
        config=config,
        defaults=defaults,
        rules=rules or {},
    )
