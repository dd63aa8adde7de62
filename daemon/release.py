"""``weightcached release``: give up the weights of a place: memory, vault and socket file. Engines then load from disk.

Asks the daemon, which empties its vault, removes its socket file and ends; engines that run keep what they have mapped.
Where no daemon is left to ask, the socket file is removed here, behind the place's lock; what a service manager may
still keep cannot be reached from here, and is named.

Exit codes: 0 given up, or nothing was there · 1 something could not be given up.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weightcached.daemon.asking import ask, connect
from weightcached.daemon.claim import take
from weightcached.daemon.text import binary_size, one_line
from weightcached.protocol.command_line import USAGE_EXIT, Parser, seconds
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonDraining,
    DaemonUnreachable,
    InvalidOption,
    WeightCacheError,
)
from weightcached.protocol.messages import Release, Released
from weightcached.protocol.named_places import add_rank_arguments, named_places
from weightcached.protocol.peers import AllowList
from weightcached.protocol.place_options import NAME_OF_SOME, add_place_arguments, allow_list
from weightcached.protocol.places import Place, places_in, runtime_directory

PAUSE_S = 0.02

_NO_DAEMON = (
    "no daemon was left to ask. If it ran under systemd, weights may still be in its store: "
    "`systemctl clean --what=fdstore UNIT` empties it (systemd 254 and later; before that, stopping the unit does)"
)


@dataclass(frozen=True)
class Outcome:
    """What became of one place, in words."""

    place: Place
    text: str


def release(place: Place, *, quarantined_only: bool, allowed: AllowList, deadline: Deadline) -> Outcome:
    """Give up one place. Blocks until the socket file is gone. Raises what kept it from being given up."""
    try:
        identity = _identity(place.socket_path)
        channel = connect(place, allowed=allowed, deadline=deadline)
    except DaemonAbsent:
        return Outcome(place, "nothing is cached there")
    except DaemonUnreachable:
        if quarantined_only:
            raise
        return _remove(place, allowed)
    try:
        released = ask(channel, Release(quarantined_only=quarantined_only), Released, deadline)
    finally:
        channel.close()
    if not quarantined_only:
        _wait_gone(place.socket_path, identity, deadline)
    count = released.generations
    what = f"{count} generation{'' if count == 1 else 's'}"
    return Outcome(place, f"gave up {what}, {binary_size(released.resident_nbytes)}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _wait_gone(path: Path, identity: tuple[int, int] | None, deadline: Deadline) -> None:
    """Until the file that was there is not any more; a successor's is another one."""
    while _identity(path) == identity:
        if deadline.passed:
            raise DaemonDraining(
                "the daemon has not given up the place in time: engines may hold it up",
                where=path,
                next_step="wait longer with --timeout, or send the daemon SIGTERM twice",
            )
        time.sleep(PAUSE_S)


def _remove(place: Place, allowed: AllowList) -> Outcome:
    """With nobody behind the socket file: remove it as the place's daemon would, holding its lock."""
    claim = take(place, allowed)
    try:
        removed = claim.remove_orphan()
    finally:
        claim.release()
    return Outcome(place, f"removed the socket file; {_NO_DAEMON}" if removed else "somebody removed the socket file")


def _sockets(runtime_dir: Path, name: str | None) -> Sequence[Place]:
    places = [place for place in places_in(runtime_dir) if name is None or place.name == name]
    return [place for place in places if _identity(place.socket_path) is not None]


def main(argv: list[str]) -> int:
    """Release, print what became of each place, and return the exit code."""
    parser = Parser(
        prog="weightcached release",
        description="Give up cached weights: those of the ranks that are named, or else of every place of the runtime\n"
        "directory (with --name: of that name). Daemons end; engines keep what they have mapped.",
        epilog="exit codes: 0 given up, or nothing was there; 1 something could not be given up; 64 bad options",
    )
    add_place_arguments(parser, name=NAME_OF_SOME)
    add_rank_arguments(parser)
    parser.add_argument(
        "--quarantined", action="store_true", help="only what is kept and not served; daemons go on serving"
    )
    parser.add_argument("--timeout", type=seconds, default=30.0, metavar="S", help="for each place (default: 30)")
    given = parser.parse_args(argv)
    try:
        runtime_dir = runtime_directory(given.runtime_dir)
        named = named_places(given, runtime_dir)
        places = named if named is not None else _sockets(runtime_dir, given.name)
    except WeightCacheError as error:
        print(one_line(f"weightcached release: {error}"), file=sys.stderr)
        return USAGE_EXIT if isinstance(error, InvalidOption) else 1
    if not places:
        print(f"nothing is cached in {runtime_dir}" + (f" under the name {given.name}" if given.name else ""))
    failed = False
    for place in places:
        try:
            outcome = release(
                place,
                quarantined_only=given.quarantined,
                allowed=allow_list(given),
                deadline=Deadline.after(given.timeout),
            )
        except WeightCacheError as error:
            failed = True
            print(one_line(f"{place}: {error}"), file=sys.stderr)
        else:
            print(one_line(f"{outcome.place}: {outcome.text}"))
    return 1 if failed else 0
