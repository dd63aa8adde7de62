"""What daemons say of themselves, collected: one :class:`Seen` for each place, whether or not its daemon answers.

Owns asking every place of a runtime directory at once, and the JSON document that says all that is known. Renders
nothing else: tables are ``status.py``'s, metrics ``metrics.py``'s, pages ``pages.py``'s. :func:`look` and
:func:`collect` block.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weightcached.daemon.asking import ask_status, connect
from weightcached.daemon.states import SERVING, State
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import DaemonAbsent, DaemonDraining, WeightCacheError
from weightcached.protocol.messages import Report
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place, places_in

_AT_ONCE = 16


@dataclass(frozen=True)
class Seen:
    """One place: its daemon's report, or why there is none."""

    place: Place
    report: Report | None = None
    problem: WeightCacheError | None = None

    @property
    def state(self) -> str:
        """The daemon's state, or ``unreachable``, ``untrusted_daemon``, … for one that gave no report."""
        if self.report is not None:
            return self.report.state
        if isinstance(self.problem, DaemonDraining):
            return State.DRAINING
        return self.problem.code.removeprefix("daemon_") if self.problem is not None else "unreachable"

    @property
    def ready(self) -> bool:
        """Whether engines are granted weights there."""
        return self.state in SERVING


def look(place: Place, *, allowed: AllowList, timeout_s: float) -> Seen:
    """Ask one place. Blocks up to the timeout."""
    deadline = Deadline.after(timeout_s)
    try:
        channel = connect(place, allowed=allowed, deadline=deadline)
        try:
            return Seen(place, report=ask_status(channel, deadline))
        finally:
            channel.close()
    except WeightCacheError as error:
        return Seen(place, problem=error)


def collect(runtime_dir: Path, *, name: str | None, allowed: AllowList, timeout_s: float) -> list[Seen]:
    """Every place of ``runtime_dir`` that has a socket file, asked at once. Raises InvalidPlace for a directory that
    cannot be listed.
    """
    places = [place for place in places_in(runtime_dir) if name is None or place.name == name]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        seen = list(pool.map(partial(look, allowed=allowed, timeout_s=timeout_s), places))
    return [one for one in seen if not isinstance(one.problem, DaemonAbsent)]


def as_json(seen: Sequence[Seen]) -> dict[str, Any]:
    """Everything known of daemons, for programs."""
    return {"daemons": [_json(one) for one in seen]}


def _json(one: Seen) -> dict[str, Any]:
    if one.report is not None:
        return {"reachable": True, **one.report.model_dump()}
    problem = one.problem.as_fields() if one.problem is not None else None
    return {
        "reachable": False,
        "place": str(one.place),
        "socket_path": str(one.place.socket_path),
        "state": one.state,
        "problem": problem,
    }
