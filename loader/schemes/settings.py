"""Reading ``quantization_config``: typed settings, and which modules its patterns name.

Pure. What is missing or of a wrong type is a ModelConfigError here, by its path within ``config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weightcached.protocol.errors import ModelConfigError, UnsupportedModel
from weightcached.protocol.text import shown


@dataclass(frozen=True, slots=True)
class Settings:
    """One object of ``config.json`` and its path."""

    values: Mapping[str, Any]
    path: str

    @classmethod
    def of(cls, value: Any, path: str) -> Settings:
        if not isinstance(value, Mapping):
            raise _unusable(path, "an object", value)
        return cls(value, path)

    def within(self, key: str) -> Settings | None:
        """The object under ``key``, or None where there is none."""
        value = self.values.get(key)
        return None if value is None else Settings.of(value, f"{self.path}.{key}")

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise _unusable(f"{self.path}.{key}", "a string", value)
        return default if value is None else value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise _unusable(f"{self.path}.{key}", "true or false", value)
        return default if value is None else value

    def number(self, *keys: str, least: int = 1) -> int:
        """The integer under the first of ``keys`` that is there."""
        key = next((key for key in keys if key in self.values), keys[0])
        value = self.values.get(key)
        if type(value) is not int or value < least or value == 0:
            raise _unusable(f"{self.path}.{key}", f"an integer of at least {least}", value)
        return value

    def pair(self, key: str) -> tuple[int, int]:
        """The two positive integers under ``key``."""
        value = self.values.get(key)
        if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(_is_positive(n) for n in value):
            raise _unusable(f"{self.path}.{key}", "two positive integers", value)
        return value[0], value[1]

    def patterns(self, *keys: str) -> Patterns:
        """Which modules the strings under the first of ``keys`` with any name."""
        return Patterns.of(self.names(*keys))

    def names(self, *keys: str) -> tuple[str, ...]:
        """The strings under the first of ``keys`` with any; lists within lists are flattened."""
        for key in keys:
            found = tuple(_strings(self.values.get(key) or (), f"{self.path}.{key}"))
            if found:
                return found
        return ()

    def require(self, key: str, *allowed: Any) -> None:
        """Raise UnsupportedModel unless the value (null where absent) is one of ``allowed``."""
        value = self.values.get(key)
        if value not in allowed:
            raise UnsupportedModel(
                f"the checkpoint's {self.path}.{key} is not supported",
                expected=" or ".join("null" if one is None else shown(one) for one in allowed),
                found=shown(value),
                next_step="use --layout hf at TP size 1, or another checkpoint",
            )


@dataclass(frozen=True, slots=True)
class Patterns:
    """Names of modules: ``re:`` and a regular expression that matches from the start, or whole dotted components that
    stand in a module's name in a row (``lm_head``, ``mlp.gate``, a full name).
    """

    words: frozenset[str]
    expressions: tuple[str, ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> Patterns:
        expressions = tuple(name[3:] for name in names if name.startswith("re:"))
        return cls(frozenset(name for name in names if not name.startswith("re:")), expressions)

    def __bool__(self) -> bool:
        return bool(self.words or self.expressions)

    def name(self, module: str) -> bool:
        """Whether one of them is this module's."""
        if self.words:
            parts = module.split(".")
            ends = range(1, len(parts) + 1)
            if any(".".join(parts[start:end]) in self.words for end in ends for start in range(end)):
                return True
        return any(is_match(module, expression) for expression in self.expressions)


def is_match(module: str, expression: str) -> bool:
    """Whether the regular expression of a ``quantization_config`` matches the module's name from its start."""
    try:
        return re.match(expression, module) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelConfigError(
            "config.json's quantization_config has a pattern that is no usable regular expression",
            found=f"{shown(expression)}: {error}",
        ) from error


def _strings(value: Any, path: str) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item, path)
    else:
        raise _unusable(path, "strings", value)


def _is_positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _unusable(path: str, expected: str, found: Any) -> ModelConfigError:
    return ModelConfigError(f"config.json's {path} is unusable", expected=expected, found=shown(found))
