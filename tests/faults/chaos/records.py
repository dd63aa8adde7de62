"""What a process writes, one JSON object a line: read by a thread, so that the writer never blocks.

Owns the stream. Lines that are no JSON (a traceback, say) are kept as ``{"text": line}``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from tests.faults.chaos.broken import Broken

Record = dict[str, Any]


class Records:
    """All records of one process so far. A position in them is a ``mark``."""

    def __init__(self, stream: IO[str], *, who: str) -> None:
        self._who = who
        self._stream = stream
        self._records: list[Record] = []
        self._ended = False
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"records of {who}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stream:
            try:
                record = json.loads(line)
            except ValueError:
                record = {"text": line.rstrip()}
            with self._arrived:
                self._records.append(record if isinstance(record, dict) else {"text": line.rstrip()})
                self._arrived.notify_all()
        self._stream.close()
        with self._arrived:
            self._ended = True
            self._arrived.notify_all()

    def mark(self) -> int:
        with self._arrived:
            return len(self._records)

    def since(self, mark: int) -> list[Record]:
        with self._arrived:
            return self._records[mark:]

    def last(self) -> Record | None:
        with self._arrived:
            return self._records[-1] if self._records else None

    def wait(self, wanted: Callable[[Record], bool], *, what: str, mark: int, timeout_s: float) -> Record:
        """The first record from ``mark`` on that is ``wanted``. Broken (`progress`) when it does not come in time."""
        deadline_s = time.monotonic() + timeout_s
        seen = mark
        with self._arrived:
            while True:
                for record in self._records[seen:]:
                    if wanted(record):
                        return record
                seen = len(self._records)
                left_s = deadline_s - time.monotonic()
                if self._ended or left_s <= 0:
                    how = "it ended" if self._ended else f"not within {timeout_s:g} s"
                    raise Broken("progress", f"{self._who}: waited for {what}: {how}")
                self._arrived.wait(left_s)

    def join(self) -> None:
        """After the process's end: until all it wrote is here."""
        self._reader.join(10.0)
