"""A pause of Python's garbage collector, for pure code that makes very many objects and no cycles.

Making 100,000 rows sets off collection after collection, each over everything made so far: a third of the time of
parsing a large header or planning it. Reference counting goes on as always.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, cycles are not looked for, in any thread. Leaves the collector as it found it, but for what was made
    inside: that counts as old, or the first thing afterwards would be to look at all of it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # what somebody has frozen stays so
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
