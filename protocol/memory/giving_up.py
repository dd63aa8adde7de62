"""Giving memory back on the way out of a failure, which stays what is raised.

Of a device that is lost every call fails, what gives things back too: whoever raised that would hide what happened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from weightcached.protocol.errors import WeightCacheError


class Closable(Protocol):
    def close(self) -> None: ...


def give_up(*things: Closable) -> None:
    """Close each, whatever the others say to it. For a block that handles a failure."""
    for thing in things:
        with suppress(WeightCacheError):
            thing.close()


class ClosedAfterwards(ABC):
    """A context manager, for what has a ``close`` that raises: only where the block has ended well."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if failure is None:
            self.close()
        else:
            give_up(self)
