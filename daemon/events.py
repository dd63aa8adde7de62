"""What happens here, said to whoever listens on the control plane: one counted stream of events.

Owns the sequence, what each event says of the moment, and how often progress is worth saying. Who listens, and how it
reaches them, is the sink's (``daemon/control``), which comes when the data plane has long been there and may never
come; until then events are only counted. Called from wherever something happens, on the event loop; never raises for
what a listener does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from weightcached.protocol.control import ControlEvent, EventKind, RankState
from weightcached.protocol.messages import Loading, shortened

if TYPE_CHECKING:
    from weightcached.daemon.leases import Lease
    from weightcached.daemon.record import Record

PROGRESS_INTERVAL_S = 0.5
"""Between two of one stage."""

_WITH_RANK_STATE: frozenset[EventKind] = frozenset({"snapshot", "published", "change"})


class Events:
    """``record`` says what things are like at the moment."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._sequence = 0
        self._stage, self._bytes_done = "", 0
        self._progress_s = 0.0
        self.describe: Callable[[], RankState] | None = None
        """Everything about this rank, for events that carry it."""
        self.sink: Callable[[ControlEvent], None] | None = None
        """Hears every event."""

    def say(self, kind: EventKind, message: str = "", **fields: Any) -> None:
        """One more event. ``fields`` are those of :class:`ControlEvent` that belong to its kind."""
        self._sequence += 1
        if self.sink is not None:
            self.sink(self._event(kind, message, **fields))

    def snapshot(self) -> ControlEvent:
        """What things are like after the last event that was said. It has that event's number."""
        progress = self._record.progress.current
        return self._event("snapshot", **_of_progress(progress))

    def progress(self, loading: Loading) -> None:
        """The load has come so far: said when a stage begins, and now and then within it as bytes are done."""
        now_s = time.monotonic()
        if loading.stage == self._stage and (
            loading.bytes_done == self._bytes_done or now_s - self._progress_s < PROGRESS_INTERVAL_S
        ):
            return
        self._stage, self._bytes_done, self._progress_s = loading.stage, loading.bytes_done, now_s
        self.say("progress", **_of_progress(loading))

    def lease(self, kind: Literal["lease_opened", "lease_closed"], lease: Lease) -> None:
        """An engine holds a generation from now on, or no longer."""
        pid = lease.peer.pid or lease.claimed_pid
        said: dict[str, Any] = {"pid": pid, "uid": lease.peer.uid, "name": lease.name}
        self.say(kind, **said, generation=lease.generation, version=None)

    def _event(self, kind: EventKind, message: str = "", **fields: Any) -> ControlEvent:
        record = self._record
        published = record.published
        standing: dict[str, Any] = {"generation": None, "version": None}
        if published is not None:
            standing = {"generation": published.generation.id, "version": published.generation.version}
        if kind in _WITH_RANK_STATE and self.describe is not None:
            standing["rank_state"] = self.describe()
        return ControlEvent(
            kind=kind,
            nonce=record.nonce,
            sequence=self._sequence,
            place=str(record.options.place),
            time_s=time.time(),
            state=record.state.value,
            message=shortened(message),
            **{**standing, **fields},
        )


def _of_progress(loading: Loading) -> dict[str, Any]:
    return {
        "stage": loading.stage,
        "bytes_done": loading.bytes_done,
        "bytes_total": loading.bytes_total,
        "bytes_per_s": loading.bytes_per_s,
    }
