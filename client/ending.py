"""Ending this process from whatever thread, with a status of its own and the reason on standard error.

Owns that one step. Why a process is ended is its callers' business: ``stale.py`` and ``holder.py``.

Not by SIGTERM to itself: a handler may take it for an orderly stop and report success, or may never come to run because
the main thread does not return to Python; and service managers count it as a clean end, after which
``Restart=on-failure`` starts nothing. Not by an exception: this is not the main thread.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

_STDERR = 2


def end_process(status: int, words: str, *, within_s: float, first: Callable[[], object] | None = None) -> NoReturn:
    """Write ``words``, call ``first``, and end with ``status``: no ``finally`` runs, no ``atexit``. After ``within_s``
    even where writing or ``first`` blocks.
    """
    with suppress(RuntimeError):  # no thread can be started any more: then nothing bounds what follows
        late = threading.Timer(within_s, os._exit, (status,))
        late.daemon = True
        late.start()
    with suppress(OSError):
        os.write(_STDERR, f"weightcached: {words}\n".encode())
    try:
        if first is not None:
            first()
    except Exception:  # noqa: BLE001 - it was to be called before the end, which comes all the same
        traceback.print_exc()
    finally:
        os._exit(status)
