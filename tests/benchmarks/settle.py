"""Memory that the machine really has, before a clock starts. Called in measured processes, after imports.

A virtual machine's free memory may not be backed by its host: never touched yet, or given back while it was free ("free
page reporting", two seconds after it became free). Whoever takes such a page first pays for the host's page too, which
can cost ten times what is measured here, and whom it hits is chance. So the measured process takes as much memory as it
will need, touches it, and gives it back to its own kernel; then the clock starts.
"""

from __future__ import annotations

import mmap

_MADV_POPULATE_WRITE = 23  # Linux 5.14


def settle(nbytes: int) -> None:
    """Touch ``nbytes`` of fresh memory and free them. Blocks for as long as the host needs."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(_MADV_POPULATE_WRITE)
    memory.close()
