"""``weightcached events``: what happens at the daemons of a runtime directory, in words or as lines of JSON.

Owns the options, the words and the exit codes; ``watching.py`` hears. Every place begins with a ``snapshot``: what
things are like. Without ``--follow`` that is all.

Exit codes: 0 every place has told · 1 some could not be listened to · 3 there is none · 64 bad options. With
``--follow`` it ends with a signal.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from weightcached.client.control.listening import Heard, Listener, Lost
from weightcached.client.control.watching import Finding, watch
from weightcached.protocol.command_line import USAGE_EXIT, Parser, positive_seconds
from weightcached.protocol.control import ControlEvent
from weightcached.protocol.errors import InvalidOption, WeightCacheError
from weightcached.protocol.named_places import add_rank_arguments, named_places, places_with_socket
from weightcached.protocol.peers import AllowList
from weightcached.protocol.place_options import NAME_OF_SOME, add_place_arguments, allow_list
from weightcached.protocol.places import Place, runtime_directory
from weightcached.protocol.text import binary_size, one_line

TOLD_EXIT, UNTOLD_EXIT, NONE_EXIT = 0, 1, 3


def in_words(said: Heard | Lost) -> str:
    """One line."""
    if isinstance(said, Lost):
        return one_line(f"{_clock(time.time())} {said.place} lost: {said.reason}")
    event = said.event
    missed = f"({said.missed} events before this one were missed) " if said.missed else ""
    return one_line(f"{_clock(event.time_s)} {event.place} {missed}{event.kind}: {_about(event)}")


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _about(event: ControlEvent) -> str:
    parts = [event.state]
    if event.kind in ("lease_opened", "lease_closed"):
        parts = [f"pid {event.pid} (uid {event.uid}), {event.name}"]
    elif event.kind in ("progress", "snapshot") and event.stage not in (None, event.state):
        done = f" {100 * event.bytes_done / event.bytes_total:.0f}%" if event.bytes_total else ""
        rate = f" at {binary_size(event.bytes_per_s)}/s" if event.bytes_per_s else ""
        parts.append(f"{event.stage}{done}{rate}")
    change = event.rank_state.change if event.rank_state is not None else None
    if event.kind in ("change", "snapshot") and change is not None:
        parts.append(f"change {change.transaction} {change.state}")
    if event.generation is not None:
        parts.append(f"generation {event.generation}")
    if event.version is not None:
        parts.append(f"version {event.version}")
    if event.drops:
        parts.append(f"drop {', '.join(event.drops)}")
    if event.message:
        parts.append(event.message)
    return "; ".join(parts)


def as_json(said: Heard | Lost) -> dict[str, Any]:
    """One event; of a place that is lost, kind ``lost`` and the error."""
    if isinstance(said, Lost):
        return {"kind": "lost", "place": str(said.place), "error": said.reason.as_fields()}
    return {**said.event.model_dump(mode="json"), "missed": said.missed}


async def _snapshot(place: Place, *, allowed: AllowList, timeout_s: float) -> Heard | Lost:
    try:
        async with Listener(place, allowed=allowed) as listener:
            return await listener.begin(timeout_s)
    except WeightCacheError as error:
        return Lost(place, error)


async def _snapshots(places: Sequence[Place], *, allowed: AllowList, timeout_s: float) -> list[Heard | Lost]:
    return list(await asyncio.gather(*(_snapshot(one, allowed=allowed, timeout_s=timeout_s) for one in places)))


async def _follow(find: Finding, *, allowed: AllowList, forever: bool, json_lines: bool) -> None:
    async for said in watch(find, allowed=allowed, forever=forever):
        _say(said, json_lines=json_lines)


def _say(said: Heard | Lost, *, json_lines: bool) -> None:
    print(json.dumps(as_json(said)) if json_lines else in_words(said), flush=True)


def main(argv: list[str]) -> int:
    """Listen, print, and return the exit code."""
    parser = Parser(
        prog="weightcached events",
        description="Tell what things are like at the ranks that are named, or else at every place of the runtime\n"
        "directory (with --name: of that name), and with --follow what happens from then on: daemons that start\n"
        "later, or again, included. Only root and a daemon's own user may listen.",
        epilog="exit codes: 0 every place has told; 1 some could not be listened to; 3 there is none; 64 bad options.\n"
        "With --follow it ends with a signal: 130 interrupted.",
    )
    parser.add_argument("--follow", action="store_true", help="go on listening")
    parser.add_argument("--json", action="store_true", help="one JSON document a line")
    add_place_arguments(parser, name=NAME_OF_SOME)
    add_rank_arguments(parser)
    parser.add_argument(
        "--timeout", type=positive_seconds, default=10.0, metavar="S", help="for each first word (default: 10)"
    )
    given = parser.parse_args(argv)
    try:
        runtime_dir = runtime_directory(given.runtime_dir)
        named = named_places(given, runtime_dir)

        def find() -> list[Place]:
            return named if named is not None else places_with_socket(runtime_dir, given.name)

        if given.follow:
            following = _follow(find, allowed=allow_list(given), forever=named is not None, json_lines=given.json)
            asyncio.run(following)
        told = asyncio.run(_snapshots(find(), allowed=allow_list(given), timeout_s=given.timeout))
    except WeightCacheError as error:
        print(one_line(f"weightcached events: {error}"), file=sys.stderr)
        return USAGE_EXIT if isinstance(error, InvalidOption) else UNTOLD_EXIT
    for said in told:
        _say(said, json_lines=given.json)
    if not told:
        return NONE_EXIT
    return UNTOLD_EXIT if any(isinstance(said, Lost) for said in told) else TOLD_EXIT
