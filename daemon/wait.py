"""``weightcached wait``: return when places are ready, whether or not their daemons have started yet.

Exit codes: 0 ready · 1 not ready in time · 2 a load failed, or a place or a GPU cannot be used.

A daemon that is not there yet, or died and may be restarted, is looked for again until the time is over; nothing
announces a socket. Once there is a connection it is kept, and the daemon is asked on it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from weightcached.daemon.asking import ask_status, connect
from weightcached.daemon.states import SERVING, State
from weightcached.daemon.text import one_line
from weightcached.protocol.channel import Channel
from weightcached.protocol.command_line import USAGE_EXIT, Parser, seconds
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonDraining,
    DaemonFailed,
    DaemonNotReady,
    DaemonUnreachable,
    DeviceAbsent,
    DeviceFailed,
    WeightCacheError,
)
from weightcached.protocol.named_places import add_rank_arguments, named_places, places_with_socket
from weightcached.protocol.peers import AllowList
from weightcached.protocol.place_options import NAME_OF_SOME, add_place_arguments, allow_list
from weightcached.protocol.places import Place, runtime_directory

PAUSE_S = 0.1
_ANSWER_TIMEOUT_S = 5.0

_MAY_COME = (DaemonAbsent, DaemonUnreachable, DaemonDraining, DaemonNotReady)
"""What another look may find changed: the daemon has not bound, was killed, is stopping, is stuck."""


class Watched:
    """One place and the connection that is kept to its daemon."""

    def __init__(self, place: Place, allowed: AllowList) -> None:
        self.place = place
        self._allowed = allowed
        self._channel: Channel | None = None
        self.last_seen = "nobody has looked"

    def is_ready(self, overall: Deadline) -> bool:
        """Look once. Raises DaemonFailed with the daemon's reason, or what makes the place unusable."""
        deadline = Deadline.after(min(_ANSWER_TIMEOUT_S, max(overall.remaining_s(), PAUSE_S)))
        try:
            if self._channel is None:
                self._channel = connect(self.place, allowed=self._allowed, deadline=deadline)
            report = ask_status(self._channel, deadline)
        except _MAY_COME as error:
            self.close()
            self.last_seen = str(error)
            return False
        self.last_seen = f"{report.state}, stage {report.stage!r}"
        if report.state == State.FAILED:
            raise DaemonFailed("the daemon could not load its weights", found=report.last_error, where=self.place)
        return report.state in SERVING

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def wait(find: Callable[[], Sequence[Place]], *, allowed: AllowList, deadline: Deadline) -> None:
    """Block until ``find`` names at least one place and all that it names are ready.

    Raises DaemonNotReady at the deadline, saying what each place was last seen doing; DaemonFailed at once.
    """
    watched: dict[Place, Watched] = {}
    try:
        while True:
            for place in find():
                watched.setdefault(place, Watched(place, allowed))
            waiting = [one for one in watched.values() if not one.is_ready(deadline)]
            if watched and not waiting:
                return
            if deadline.passed:
                seen = "; ".join(f"{one.place}: {one.last_seen}" for one in waiting) or "no socket at all"
                raise DaemonNotReady("not ready in time", found=seen)
            time.sleep(min(PAUSE_S, deadline.remaining_s()))
    finally:
        for one in watched.values():
            one.close()


def main(argv: list[str]) -> int:
    """Wait, and return the exit code."""
    parser = Parser(
        prog="weightcached wait",
        description="Return when every place is ready: those of the ranks that are named, started or\n"
        "not, or else all that have a socket, and at least one. Name the sizes where several ranks\n"
        "are only just being started.",
        epilog="exit codes: 0 ready; 1 not ready in time; 2 a load failed, or a place or a GPU cannot be used;\n"
        "64 bad options",
    )
    parser.add_argument("--timeout", type=seconds, required=True, metavar="S", help="how long to wait at most")
    add_place_arguments(parser, name=NAME_OF_SOME)
    add_rank_arguments(parser)
    given = parser.parse_args(argv)
    try:
        runtime_dir = runtime_directory(given.runtime_dir)
        named = named_places(given, runtime_dir)
    except WeightCacheError as error:
        print(one_line(f"weightcached wait: {error}"), file=sys.stderr)
        return 2 if isinstance(error, DeviceAbsent | DeviceFailed) else USAGE_EXIT

    def find() -> list[Place]:
        return named if named is not None else places_with_socket(runtime_dir, given.name)

    try:
        wait(find, allowed=allow_list(given), deadline=Deadline.after(given.timeout))
    except WeightCacheError as error:
        print(one_line(f"weightcached wait: {error}"), file=sys.stderr)
        return 1 if isinstance(error, DaemonNotReady) else 2
    return 0
