"""What an engine does when its place serves other weights than it has mapped: the policy it chose at attach.

Owns the three policies. The weights in use stay what they were, and valid, under each of them: nobody can change them.
What ends is the lease, so no daemon knows of this engine any more, and its next start gets other weights.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NoReturn

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
_STDERR = 2


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
    end_process(
        f"{where} serves other weights now; as on_stale='exit' asks, this process ends with status "
        f"{STALE_EXIT}: {reason}"
    )


def end_process(words: str) -> NoReturn:
    """End this process with :data:`STALE_EXIT`, from whatever thread; within five seconds, even where what it wrote
    cannot be flushed. Nothing else runs: no ``finally``, no ``atexit``. ``words`` say why.

    Not by SIGTERM to itself: a handler may take it for an orderly stop and report success, or may never come to run
    because the main thread does not return to Python; and service managers count it as a clean end, after which
    ``Restart=on-failure`` starts nothing. Not by an exception: this is not the main thread.
    """
    with suppress(RuntimeError):  # no thread can be started any more: then nothing bounds the flushing
        late = threading.Timer(_FLUSH_TIMEOUT_S, os._exit, (STALE_EXIT,))
        late.daemon = True
        late.start()
    with suppress(OSError):
        os.write(_STDERR, f"weightcached: {words}\n".encode())
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # closed, or nobody reads it: what it held is lost either way
            stream.flush()
    os._exit(STALE_EXIT)
