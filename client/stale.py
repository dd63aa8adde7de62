"""What an engine does when its place serves other weights than it has mapped: the policy it chose at attach.

Owns the three policies. The weights in use stay what they were, and valid, under each of them: nobody can change them.
What ends is the lease, so no daemon knows of this engine any more, and its next start gets other weights; the lease
comes back with weights that the place serves (``swap.py``).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NoReturn

from weightcached.client.ending import end_process
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.messages import Report

StaleCallback = Callable[[str, Report | None], object]
"""Called with the reason in words, and what the daemon says about itself now (None when it could not be asked)."""

OnStale = Literal["keep", "exit"] | StaleCallback
"""``keep``: go on with the weights at hand. A function (policy ``notify``): call it. ``exit``: end the process with
:data:`STALE_EXIT`, for a supervisor to start it again on the weights that are served now."""

STALE_EXIT = 75
"""Exit status of a process that policy ``exit`` ends: EX_TEMPFAIL of sysexits, "try again"."""

_FLUSH_TIMEOUT_S = 5.0


def checked_policy(on_stale: OnStale) -> OnStale:
    """``on_stale`` itself. InvalidOption when it is no policy."""
    if on_stale not in ("keep", "exit") and not callable(on_stale):
        raise InvalidOption(
            "unknown on_stale",
            expected="'keep', 'exit', or a function of (reason, report)",
            found=repr(on_stale),
            next_step="to be notified, pass the function itself",
        )
    return on_stale


def exit_process(where: str, reason: str) -> NoReturn:
    """What policy ``exit`` does."""
    end_stale(
        f"{where} serves other weights now; as on_stale='exit' asks, this process ends with status "
        f"{STALE_EXIT}: {reason}"
    )


def end_stale(words: str) -> NoReturn:
    """End this process with :data:`STALE_EXIT`, from whatever thread (``ending.py``); within five seconds, even where
    what it wrote cannot be flushed. ``words`` say why.
    """
    end_process(STALE_EXIT, words, within_s=_FLUSH_TIMEOUT_S, first=_flush)


def _flush() -> None:
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # closed, or nobody reads it: what it held is lost either way
            stream.flush()
