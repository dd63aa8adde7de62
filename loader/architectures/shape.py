"""Sizes of one model, read from its ``config.json`` under the words that the tables use.

Pure. Each word has a rule: which key of ``config.json`` says it, or which other sizes make it. Families spell keys
differently, so a table may bring rules of its own. A size that is missing or impossible is an error here, before
anything is computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
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
    "keys",
    "position_table",
    "token_type_table",
    "labels",
    "experts",
    "expert_intermediate",
    "shared_intermediate",
]
"""``head`` is one head's size; ``queries`` is ``heads × head``, what the output projection takes in, and ``keys`` is
``kv_heads × head``. Those after ``keys`` are of tables that give a rule for them."""

SizeRule = Callable[["ModelShape"], int]
"""How a size is read. Raises ModelConfigError."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Every size a table may name, and the config's switches."""

    config: Mapping[str, Any]
    rules: Mapping[Size, SizeRule] = field(default_factory=lambda: SIZES)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What Transformers takes for an absent key."""
    has_stacks: bool = False
    """The files have each layer's experts in one tensor, as Transformers 5 has them in memory and may save them."""

    def size(self, name: Size) -> int:
        """Raises ModelConfigError for a size that ``config.json`` does not give."""
        return self.rules[name](self)

    def value(self, key: str) -> Any:
        """What ``config.json`` says, or what Transformers takes where it lacks the key; ``None`` for null and nothing.

        Nobody has checked it.
        """
        return self.config.get(key, self.defaults.get(key))

    def number(self, *keys: str) -> int:
        """The positive integer under the first of ``keys`` that is there. Raises ModelConfigError."""
        key = next((key for key in keys if key in self.config), keys[0])
        value = self.value(key)
        if type(value) is not int or value <= 0:
            raise ModelConfigError(
                f"config.json's {key} is unusable", expected="a positive integer", found=shown(value)
            )
        return value

    def count(self, key: str) -> int:
        """The integer, 0 or more, under ``key``; null is 0, as is an absent one without a default. Raises
        ModelConfigError.
        """
        value = self.value(key)
        if value is None:
            return 0
        if type(value) is not int or value < 0:
            raise ModelConfigError(
                f"config.json's {key} is unusable", expected="an integer, 0 or more", found=shown(value)
            )
        return value

    def switch(self, name: str) -> bool:
        """A boolean of ``config.json``; null is false, and so is absent where Transformers has no default. Raises
        ModelConfigError when it is neither.
        """
        value = self.value(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ModelConfigError(
                f"config.json's {name} is not a boolean", expected="true or false", found=shown(value)
            )
        return value


def named(*keys: str, otherwise: SizeRule | None = None) -> SizeRule:
    """The size under the first of ``keys`` that is there: spellings of one thing. ``otherwise``: where it is null."""

    def rule(model: ModelShape) -> int:
        if otherwise is not None and all(model.value(key) is None for key in keys):
            return otherwise(model)
        return model.number(*keys)

    return rule


def product(first: str, second: str) -> SizeRule:
    """The product of two keys."""
    return lambda model: model.number(first) * model.number(second)


def _hidden_over_heads(model: ModelShape) -> int:
    hidden, heads = model.size("hidden"), model.size("heads")
    if hidden % heads:
        raise ModelConfigError(
            "config.json has no head_dim, and hidden_size does not divide into the heads",
            expected=f"a multiple of {heads}",
            found=hidden,
        )
    return hidden // heads


def _heads(model: ModelShape) -> int:
    return model.size("heads")


SIZES: Mapping[Size, SizeRule] = MappingProxyType(
    {
        "hidden": named("hidden_size"),
        "intermediate": named("intermediate_size"),
        "vocabulary": named("vocab_size"),
        "layers": named("num_hidden_layers"),
        "heads": named("num_attention_heads"),
        "kv_heads": named("num_key_value_heads", otherwise=_heads),
        "head": named("head_dim", otherwise=_hidden_over_heads),
        "queries": lambda model: model.size("heads") * model.size("head"),
        "keys": lambda model: model.size("kv_heads") * model.size("head"),
    }
)
"""The rules that tables start from."""

PLAIN_HEADS: Mapping[Size, SizeRule] = MappingProxyType({"kv_heads": _heads, "head": _hidden_over_heads})
"""For families older than grouped queries: what ``config.json`` says of them is no key of theirs."""
