"""What the driver gave and is to be given back, once: when closed, or when the last reference to its owner goes.

Owns that life, and giving things of a context back in their context, whatever thread and whenever that is. Not at the
interpreter's end: the process's own end gives everything back, and the driver may be gone before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Self

from weightcached.protocol.memory.cuda import driver


class Owned:
    """A thing of the driver's. A context manager; whoever uses what it stands for keeps a reference to it."""

    _back: weakref.finalize[..., Owned]

    def _owns(self, give_back: Callable[..., object], *arguments: object, **named: object) -> None:
        """From now on the thing is ours, and ``give_back(*arguments)`` is how it is given back."""
        self._back = weakref.finalize(self, give_back, *arguments, **named)
        self._back.atexit = False

    def close(self) -> None:
        """Give it back now. Raises what the driver says to it. Safe to call twice."""
        self._back()

    @property
    def closed(self) -> bool:
        return not self._back.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def current_context() -> int:
    """The handle of the context that is current in this thread; 0: there is none."""
    return int(driver.call("cuCtxGetCurrent", asked="the current context"))


def call_within(context: int, name: str, *arguments: object, asked: str) -> None:
    """``name`` with ``context`` current: a finalizer runs in any thread, with any context or none."""
    driver.call("cuCtxPushCurrent", context, asked=asked)
    try:
        driver.call(name, *arguments, asked=asked)
    finally:
        driver.call("cuCtxPopCurrent", asked=asked)
