"""The base of every value that a key is made of: frozen, complete, and checked however it comes to be."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer


class Frozen(BaseModel):
    """A model that cannot be changed and knows all its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, checked. Pydantic's own checks nothing, and carries a cached fingerprint along."""
        return type(self).model_validate({**self.model_dump(), **(update or {})})


def freeze(value: Any) -> Any:
    """``value``, its mappings and lists made read-only, all the way down."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: freeze(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    return value


def thaw(value: Any) -> Any:
    """What :func:`freeze` has frozen, as plain dicts and lists."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [thaw(item) for item in value]
    return value


FrozenJson = Annotated[Mapping[str, Any], AfterValidator(freeze), PlainSerializer(thaw)]
