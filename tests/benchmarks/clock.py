"""The clock of a measured load: wall time, and processor time of all threads of this process."""

from __future__ import annotations

import time
from typing import Any


class Clock:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, Any]:
        """``seconds`` and ``cpu_seconds`` so far."""
        return {"seconds": time.perf_counter() - self._wall_s, "cpu_seconds": time.process_time() - self._cpu_s}
