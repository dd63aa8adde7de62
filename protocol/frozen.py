"""The base of every value that a key is made of: frozen, complete, and checked however it comes to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A model that cannot be changed and knows all its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, checked. Pydantic's own checks nothing, and carries a cached fingerprint along."""
        return type(self).model_validate({**self.model_dump(), **(update or {})})
