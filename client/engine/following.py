"""Owns the thread that brings an engine's weights to what its daemon publishes, and what became of it so far."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from weightcached.client.backoff import Backoff
from weightcached.client.stale import STALE_EXIT, end_stale
from weightcached.protocol.errors import (
    RESTARTING,
    GenerationGone,
    ReadersInside,
    SwapFailed,
    WeightCacheError,
)

if TYPE_CHECKING:
    from weightcached.client.following import Follower, Published
    from weightcached.client.swap import Swapped

SWITCH_TIMEOUT_S = 600.0
"""For staging, and then for answers under way: one may be long."""

_TRIED_AGAIN = (*RESTARTING, GenerationGone)
"""What another attempt may not meet: a daemon that is away, or that has another generation to give by now."""

_log = logging.getLogger(__name__)


class Switch(Protocol):
    def __call__(self, published: Published, *, timeout_s: float) -> Swapped: ...


class Following:
    """Runs for the length of a ``with`` block. What cannot be switched to is said, and the weights in use are kept;
    what may be possible later is tried again. Where they are lost in the attempt, the process ends as one does that is
    to be started again.
    """

    def __init__(self, follower: Follower, switch: Switch) -> None:
        self._follower = follower
        self._switch = switch
        self._switches = 0
        self._last: Swapped | None = None
        self._error: str | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="weightcached-following", daemon=True)

    def status(self) -> dict[str, Any]:
        """How often weights were switched, the latest switch, and why the latest attempt failed, if it did."""
        last = self._last
        return {
            "switches": self._switches,
            "from_version": None if last is None else last.from_version,
            "populate_s": None if last is None else last.populate_s,
            "swap_s": None if last is None else last.swap_s,
            "error": self._error,
        }

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._follower.nudge()
        self._thread.join()

    def _run(self) -> None:
        refused: str | None = None
        again_s: float | None = None
        backoff = Backoff()
        while True:
            self._follower.wait(again_s)
            if self._over:
                return
            again_s = None
            published: Published | None = None
            try:
                published = self._follower.pending()
                if published is None:
                    self._error = None
                    continue
                if published.generation == refused:
                    continue
                _log.info("switching to version %s, generation %s", published.version, published.generation)
                self._last = self._switch(published, timeout_s=SWITCH_TIMEOUT_S)
            except ReadersInside as error:
                self._error = str(error)
                self._follower.nudge()  # the answers under way end at some time
            except (*_TRIED_AGAIN, OSError) as error:  # OSError: this process is short of something
                if str(error) != self._error:
                    _log.warning("the weights in use are kept for now: %s", error)
                self._error = str(error)
                again_s = backoff.next_s()
            except WeightCacheError as error:
                if isinstance(error, SwapFailed) and not error.intact:
                    end_stale(f"the weights are lost, and this process ends with status {STALE_EXIT}: {error}")
                self._error = str(error)
                refused = None if published is None else published.generation
                _log.warning("the weights in use are kept: %s", error)
            else:
                self._switches += 1
                self._error = None
                backoff = Backoff()
                _log.info("switched in %.1f ms, prepared in %.2f s", self._last.swap_s * 1e3, self._last.populate_s)
