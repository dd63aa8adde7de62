"""Looking at another process until something holds: for what it closes or ends, which nothing announces."""

import time
from collections.abc import Callable

from weightcached.protocol.deadline import Deadline

_PAUSE_S = 0.01


def eventually(holds: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    """AssertionError where it does not come to hold."""
    deadline = Deadline.after(timeout_s)
    while not holds():
        assert not deadline.passed, "it never came to hold"
        time.sleep(_PAUSE_S)
