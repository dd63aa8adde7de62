"""What work costs in processor time, beside other work of the same process: a machine's own speed falls out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from weightcached.loader.collector import collector_paused


def costs_at_most(times: float, work: Callable[[], object], *, of: Callable[[], object]) -> bool:
    """Whether ``work`` takes at most ``times`` the processor time of ``of``: at best, of a few, because others may be
    working on this machine.
    """
    return any(_processor_s(work) <= times * _processor_s(of) for _ in range(5))


def _processor_s(work: Callable[[], object]) -> float:
    """Without a look for cycles meanwhile, which would go over all that tests before have left."""
    gc.collect()
    with collector_paused():
        began_s = time.process_time()
        work()
        return time.process_time() - began_s
