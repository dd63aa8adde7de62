"""File descriptors with an owner: from creation to hand-over, exactly one object answers for closing each.

Owns :class:`OwnedFds`, the guard that every received or created descriptor sits in until somebody takes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from types import TracebackType


class OwnedFds:
    """A list of descriptors, all closed on :meth:`close` (or leaving the ``with`` block) except those taken."""

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds: list[int | None] = [*fds]

    def __len__(self) -> int:
        return len(self._fds)

    def append(self, fd: int) -> None:
        """Own one more."""
        self._fds.append(fd)

    def extend(self, fds: Iterable[int]) -> None:
        """Own several more."""
        self._fds.extend(fds)

    def __getitem__(self, position: int) -> int:
        """Look at a descriptor without taking it."""
        fd = self._fds[position]
        if fd is None:
            raise ValueError(f"descriptor {position} was already taken")
        return fd

    def __iter__(self) -> Iterator[int]:
        """Look at each descriptor without taking it."""
        return (self[position] for position in range(len(self._fds)))

    def take(self, position: int) -> int:
        """Hand the descriptor over: the caller closes it from now on."""
        fd = self[position]
        self._fds[position] = None
        return fd

    def take_all(self) -> list[int]:
        """Hand over every descriptor, in order."""
        return [self.take(position) for position in range(len(self._fds))]

    def close(self) -> None:
        """Close what was not taken. Safe to call twice."""
        for position, fd in enumerate(self._fds):
            if fd is not None:
                self._fds[position] = None
                os.close(fd)

    def __del__(self) -> None:
        """A signal's exception comes between any two lines, also where nobody has the guard in a ``with`` yet."""
        if hasattr(self, "_fds"):
            self.close()

    def __enter__(self) -> OwnedFds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
