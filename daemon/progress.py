"""How far the load is: one tracker that everybody reads, and what people see of it.

Owns the stage, the bytes done and their rate, waking whoever waits for a change, and the display: a bar on a terminal,
plain lines elsewhere. Used on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol

from weightcached.protocol.messages import Loading

if TYPE_CHECKING:
    from tqdm import tqdm

RATE_WINDOW_S = 3.0
LINE_INTERVAL_S = 5.0

log = logging.getLogger(__name__)


class Display(Protocol):
    """Shows one stage after the other. ``close`` ends what is shown."""

    def show(self, loading: Loading) -> None: ...

    def close(self) -> None: ...


class ProgressTracker:
    """The current stage and its bytes. The rate is that of the last few seconds."""

    rates: dict[str, float]
    """Bytes per second of each stage that had bytes, on average, the last time it was gone through."""

    def __init__(self, display: Display, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._display = display
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()
        self._began: tuple[float, int] = (0.0, 0)
        self.rates = {}
        self.on_update: Callable[[Loading], None] | None = None
        """Hears of every update, when it is made."""
        self._current = Loading(stage="starting", bytes_done=0, bytes_total=0, bytes_per_s=0.0)

    @property
    def current(self) -> Loading:
        """What waiting clients are told."""
        return self._current

    def update(self, stage: str, *, bytes_done: int = 0, bytes_total: int = 0) -> None:
        """A new stage, or progress within one."""
        now_s = self._clock()
        if stage != self._current.stage or bytes_done < self._current.bytes_done:
            self._samples.clear()
            self._began = (now_s, bytes_done)
        self._samples.append((now_s, bytes_done))
        while len(self._samples) > 2 and now_s - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        then_s, before = self._samples[0]
        rate = (bytes_done - before) / (now_s - then_s) if now_s > then_s else 0.0
        self._current = Loading(stage=stage, bytes_done=bytes_done, bytes_total=bytes_total, bytes_per_s=rate)
        began_s, already = self._began
        if bytes_done > already and now_s > began_s:
            self.rates = {**self.rates, stage: (bytes_done - already) / (now_s - began_s)}
        self._display.show(self._current)
        if self.on_update is not None:
            self.on_update(self._current)

    def close(self) -> None:
        self._display.close()


class Lines:
    """Plain log lines: one when a stage begins, then one every few seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._shown_s = 0.0

    def show(self, loading: Loading) -> None:
        now_s = self._clock()
        if loading.stage == self._stage and now_s - self._shown_s < LINE_INTERVAL_S:
            return
        self._stage, self._shown_s = loading.stage, now_s
        log.info("progress", extra=_fields(loading))

    def close(self) -> None:
        pass


def _fields(loading: Loading) -> dict[str, object]:
    fields: dict[str, object] = {"stage": loading.stage}
    if loading.bytes_total:
        fields["percent"] = round(100 * loading.bytes_done / loading.bytes_total, 1)
        fields |= {"bytes_done": loading.bytes_done, "bytes_total": loading.bytes_total}
    if loading.bytes_per_s:
        fields["bytes_per_s"] = round(loading.bytes_per_s)
    return fields


class Bar:
    """A bar on a terminal, one per stage that has bytes; stages without are log lines."""

    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None
        self._stage = ""

    def show(self, loading: Loading) -> None:
        if loading.stage != self._stage:
            self.close()
            self._stage = loading.stage
            log.info("progress", extra=_fields(loading))
        if not loading.bytes_total:
            return
        if self._bar is None:
            self._bar = _new_bar(loading)
        self._bar.update(loading.bytes_done - self._bar.n)

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


def _new_bar(loading: Loading) -> tqdm[NoReturn]:
    from tqdm import tqdm

    return tqdm(total=loading.bytes_total, unit="B", unit_scale=True, desc=loading.stage, leave=False)


def display_for(log_format: str) -> Display:
    """A bar where people read standard error on a terminal, lines elsewhere."""
    return Bar() if log_format == "text" and sys.stderr.isatty() else Lines()


class Changes:
    """Wakes whoever waits for the keeper's state to change. Not for progress, which is polled once a second anyway."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def announce(self) -> None:
        event, self._next = self._next, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next announcement; false when the time is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._next.wait()
        except TimeoutError:
            return False
        return True
