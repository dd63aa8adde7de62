"""What is answered at which path: pure, from what was seen at one moment, so that no two pages of a moment disagree.

=============== ==================================================================================================
``/metrics``    200, for Prometheus
``/status.json`` 200, everything known: the document that ``weightcached status --json`` prints
``/healthz``    200 while somebody answers. In the state ``failed`` too: the daemon tells engines the reason, and to
                start it again would help nobody
``/readyz``     200 when every place is ready, and there is at least one; 503 otherwise
=============== ==================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weightcached.daemon import metrics
from weightcached.daemon.gpus import Gpu
from weightcached.daemon.gpus import as_json as gpus_as_json
from weightcached.daemon.mapped import Mapped
from weightcached.daemon.seen import Seen, as_json
from weightcached.daemon.text import one_line

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was seen at one moment."""

    seen: tuple[Seen, ...]
    mapped: Mapped | None = None
    gpus: tuple[Gpu, ...] | None = None
    """Both only where somebody has looked: the exporter does, a daemon does not."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer."""

    status: int
    content_type: str
    body: bytes


def _metrics(snapshot: Snapshot) -> Reply:
    return Reply(200, metrics.CONTENT_TYPE, metrics.render(snapshot.seen, snapshot.mapped, snapshot.gpus or ()))


def _status(snapshot: Snapshot) -> Reply:
    gpus = {} if snapshot.gpus is None else gpus_as_json(snapshot.gpus)
    return Reply(200, JSON, json.dumps(as_json(snapshot.seen) | gpus).encode() + b"\n")


def _health(snapshot: Snapshot) -> Reply:
    return Reply(200, TEXT, _states(snapshot))


def _readiness(snapshot: Snapshot) -> Reply:
    ready = bool(snapshot.seen) and all(one.ready for one in snapshot.seen)
    return Reply(200 if ready else 503, TEXT, _states(snapshot))


def _states(snapshot: Snapshot) -> bytes:
    lines = [one_line(f"{one.place}: {one.state}{_why(one)}") for one in snapshot.seen]
    return "".join(f"{line}\n" for line in lines or ["no daemon was found"]).encode()


def _why(one: Seen) -> str:
    if one.report is None:
        return f": {one.problem}"
    if one.ready or one.report.last_error is None:
        return "" if one.ready else f", stage {one.report.stage!r}"
    return f": {one.report.last_error}"


PAGES: Mapping[str, Callable[[Snapshot], Reply]] = {
    "/metrics": _metrics,
    "/status.json": _status,
    "/healthz": _health,
    "/readyz": _readiness,
}


def page(path: str, snapshot: Snapshot) -> Reply:
    """The page at ``path``, one of :data:`PAGES`."""
    return PAGES[path](snapshot)
