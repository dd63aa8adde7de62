"""SIGTERM and SIGINT as an exception, for commands that wait in many places and clean up in one.

Owns :class:`Stopped` and when it may be raised. For the main thread of a command; a library never touches signals.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """One of the signals has arrived; it is raised in the main thread, wherever that is. Later ones are ignored."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_status(self) -> int:
        """As a shell reports a process that the signal ended."""
        return 128 + self.signum


@contextmanager
def raising_stopped() -> Iterator[None]:
    """In the block, the signals raise :class:`Stopped`."""
    previous = {number: signal.signal(number, _raise_stopped) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise_stopped(signum: int, _: object) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # what follows is the clean-up, and must not be cut short
    raise Stopped(signum)


@contextmanager
def signals_later() -> Iterator[None]:
    """The signals are held back until the block is over. (A blocked mask would be inherited by children.)"""
    received: list[int] = []
    held = {number: signal.signal(number, lambda number, _: received.append(number)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    for late in received:
        signal.raise_signal(late)
