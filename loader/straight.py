"""What a destination offers as a way past the host's memory, looked for only when somebody wants to know.

Owns that it is looked for once at most, closed in the end, and an error where it was asked for and is not there.
"""

from __future__ import annotations

from collections.abc import Callable

from weightcached.loader.destination import Straight
from weightcached.protocol.errors import DeploymentError


class Offered:
    """A context manager; the way is closed when it is left."""

    def __init__(self, look: Callable[[], tuple[Straight | None, str]]) -> None:
        """``look`` as :meth:`Destination.straight`."""
        self._look = look
        self._found: tuple[Straight | None, str] | None = None

    def why_not(self) -> str | None:
        """Why there is no such way; None: there is one."""
        way, why = self._way()
        return why if way is None else None

    def required(self) -> Straight:
        """The way. Raises DeploymentError, with the reason, where there is none."""
        way, why = self._way()
        if way is None:
            raise DeploymentError(
                "files cannot be read past the host's memory",
                expected="GPUDirect Storage by way of kvikio, for weights on a GPU",
                found=why,
                next_step="choose another --load-strategy, or auto",
            )
        return way

    def _way(self) -> tuple[Straight | None, str]:
        if self._found is None:
            self._found = self._look()
        return self._found

    def __enter__(self) -> Offered:
        return self

    def __exit__(self, *_: object) -> None:
        if self._found is not None and self._found[0] is not None:
            self._found[0].close()
