"""What the driver gave and is to be given back, once: when closed, or when the last reference to its owner goes.

Owns that life, and giving things of a context back in their context, whatever thread and whenever that is. Not at the
interpreter's end: the process's own end gives everything back, and the driver may be gone before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import ClassVar

from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.memory.cuda import driver
from weightcached.protocol.memory.giving_up import ClosedAfterwards


class Owned(ClosedAfterwards):
    """A thing of the driver's. A context manager; whoever uses what it stands for keeps a reference to it."""

    stays_when_refused: ClassVar[bool] = False
    """Whether it is still ours where the driver refuses to take it back. Of other things nobody knows: the driver's
    word may be about work that had failed before, and what is gone must not be given back twice."""

    _back: weakref.finalize[..., Owned]
    _refused: Callable[[], object] | None = None

    def _owns(self, give_back: Callable[..., object], *arguments: object, **named: object) -> None:
        """From now on the thing is ours, and ``give_back(*arguments)`` is how it is given back."""
        self._back = weakref.finalize(self, give_back, *arguments, **named)
        self._back.atexit = False

    def close(self) -> None:
        """Give it back now. Raises what the driver says to it. Safe to call twice: what stays when it is refused is
        tried again, by this alone.
        """
        held, give_back, self._refused = self._back.detach(), self._refused, None
        if held is not None:
            _, function, arguments, named = held
            give_back = partial(function, *arguments, **named)
        if give_back is None:
            return
        try:
            give_back()
        except WeightCacheError:
            if self.stays_when_refused:
                self._refused = give_back
            raise

    @property
    def closed(self) -> bool:
        return not self._back.alive and self._refused is None


def current_context() -> int:
    """The handle of the context that is current in this thread; 0: there is none."""
    return int(driver.call("cuCtxGetCurrent", asked="the current context"))


def call_within(context: int, name: str, *arguments: object, asked: str) -> None:
    """``name`` with ``context`` current: a finalizer runs in any thread, with any context or none."""
    with within(context, asked=asked):
        driver.call(name, *arguments, asked=asked)


@contextmanager
def within(context: int, *, asked: str) -> Iterator[None]:
    """``context`` is current in the block. Its failure is what is raised, should the way back fail, too."""
    driver.call("cuCtxPushCurrent", context, asked=asked)
    try:
        yield
    except BaseException:
        with suppress(WeightCacheError):
            driver.call("cuCtxPopCurrent", asked=asked)
        raise
    driver.call("cuCtxPopCurrent", asked=asked)
