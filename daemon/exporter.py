"""``weightcached exporter``: metrics, health and status of every daemon of a runtime directory, at one address.

Each request asks every place anew, at once, with one deadline; requests that come meanwhile get the same answer. A
place whose daemon does not answer is in the metrics (``weightcached_up`` 0, and why), like one that does. The exporter
is a client like any other: daemons have to trust its user, and it theirs. As root it also sees what processes of the
host map that no daemon holds, and by NVML, as anybody, which processes hold a GPU's memory that no daemon knows. Exit
codes: 0 stopped by a signal · 1 the address cannot be had · 64 bad options.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import uvloop

from weightcached.daemon import log as logs
from weightcached.daemon.address import Address
from weightcached.daemon.gpus import look_at_gpus
from weightcached.daemon.http import HttpServer
from weightcached.daemon.mapped import unexplained
from weightcached.daemon.pages import Snapshot
from weightcached.daemon.patience import in_thread
from weightcached.daemon.seen import Seen, collect
from weightcached.protocol.command_line import USAGE_EXIT, Parser, positive_seconds
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.peers import AllowList
from weightcached.protocol.place_options import NAME_OF_ALL, add_place_arguments, allow_list
from weightcached.protocol.places import runtime_directory

_CANNOT_START_EXIT = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What is asked."""

    runtime_dir: Path
    name: str | None
    allowed: AllowList
    timeout_s: float

    def look(self) -> Snapshot:
        """Ask every place, and look at every process. Blocks, about as long as the timeout at most. Raises InvalidPlace
        where the runtime directory cannot be listed.
        """
        seen = collect(self.runtime_dir, name=self.name, allowed=self.allowed, timeout_s=self.timeout_s)
        return Snapshot(tuple(seen), unexplained(_held(seen)), look_at_gpus(seen))


def _held(seen: list[Seen]) -> set[str]:
    """Generations that daemons hold."""
    reports = [one.report for one in seen if one.report is not None]
    return {id_ for report in reports for id_ in (report.generation, *report.quarantined) if id_ is not None}


class Exporter:
    """Looks once for all who ask at the same time."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._looking: asyncio.Task[Snapshot] | None = None

    async def snapshot(self) -> Snapshot:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(in_thread(self._watched.look), name="look")
        return await asyncio.shield(self._looking)


async def _run(watched: Watched, address: Address) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = HttpServer(Exporter(watched).snapshot)
    try:
        bound = await server.start(address)
    except OSError as error:
        log.error("cannot listen", extra={"address": str(address), "reason": str(error)})
        return _CANNOT_START_EXIT
    log.info("listening", extra={"address": str(bound), "runtime_dir": str(watched.runtime_dir)})
    await stop.wait()
    await server.close()
    return 0


def main(argv: list[str]) -> int:
    """Serve until a signal. Exit codes are in the command's help."""
    parser = Parser(
        prog="weightcached exporter",
        description="Serve /metrics, /healthz, /readyz and /status.json for every daemon of a runtime directory.",
        epilog="exit codes: 0 stopped by a signal; 1 the address cannot be had; 64 bad options",
    )
    add_place_arguments(parser, name=NAME_OF_ALL)
    parser.add_argument("--listen", default="127.0.0.1:9410", metavar="IP:PORT", help="default: 127.0.0.1:9410")
    parser.add_argument("--allow-remote", action="store_true", help="let other hosts reach that address")
    parser.add_argument(
        "--timeout", type=positive_seconds, default=2.0, metavar="S", help="for each daemon's answer (default: 2)"
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: info"
    )
    given = parser.parse_args(argv)
    try:
        address = Address.parse(
            given.listen, option="--listen", remote_option="--allow-remote", allow_remote=given.allow_remote
        )
        watched = Watched(
            runtime_dir=runtime_directory(given.runtime_dir),
            name=given.name,
            allowed=allow_list(given),
            timeout_s=given.timeout,
        )
    except WeightCacheError as error:
        print(f"weightcached exporter: {error}", file=sys.stderr)
        return USAGE_EXIT
    logs.configure(format_name=given.log_format, level=given.log_level, place=f"exporter of {watched.runtime_dir}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(watched, address))
