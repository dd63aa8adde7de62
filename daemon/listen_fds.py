"""Descriptors that the service manager kept for us and handed back: ``LISTEN_FDS`` and its companions, once, at start.

Owns parsing the variables, checking that the descriptors are there and meant for this process, and making sure that
nobody whom this process starts inherits either. What the descriptors are is found out elsewhere, by their content:
names are hints, and systemd keeps no order. Called before anything else is opened.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from weightcached.protocol.errors import InvalidEnvironment
from weightcached.protocol.fds import OwnedFds

FIRST = 3
_UNNAMED = "unknown"
_VARIABLES = ("LISTEN_PID", "LISTEN_PIDFDID", "LISTEN_FDS", "LISTEN_FDNAMES")


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Names and descriptors, in the order they came. Whoever has this closes or takes the descriptors."""

    names: tuple[str, ...]
    fds: OwnedFds


def take_handed_over(environment: MutableMapping[str, str] = os.environ) -> HandedOver:
    """What was handed over, which may be nothing. Removes the variables; the descriptors are close-on-exec from now on.

    Raises InvalidEnvironment when the variables are meant for another process, or name what is not there: to go on
    would be to start without the weights, or to take somebody else's descriptors for them. None is touched then.
    """
    pid, _, count_text, names_text = (environment.pop(name, None) for name in _VARIABLES)
    if count_text is None and pid is None:
        return HandedOver((), OwnedFds())
    if pid != str(os.getpid()):
        raise InvalidEnvironment(
            "the descriptors that the service manager handed over are not meant for this process",
            expected=f"LISTEN_PID={os.getpid()}",
            found="no LISTEN_PID" if pid is None else f"LISTEN_PID={ascii(pid)[1:-1]}",
            next_step="let the service manager start weightcached itself: `sh -c`, `timeout` and other programs that "
            "start it as their child are the usual cause (a shell's `exec` helps); or, where the variables are "
            "left-overs, unset LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES",
        )
    count = _count(count_text)
    fds = range(FIRST, FIRST + count)
    for fd in fds:  # first: until it is seen to be true the count is only a number, and may be a huge one
        _require_inherited(fd, count)
    names = _names(names_text, count)
    for fd in fds:
        os.set_inheritable(fd, False)
    return HandedOver(names, OwnedFds(fds))


def _count(text: str | None) -> int:
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise InvalidEnvironment("LISTEN_FDS is not a count", expected="a number", found=ascii(text))
    return int(text)


def _names(text: str | None, count: int) -> tuple[str, ...]:
    if text is None:
        return (_UNNAMED,) * count
    names = tuple(text.split(":")) if text else ()
    if len(names) != count:
        raise InvalidEnvironment(
            "LISTEN_FDNAMES does not name each descriptor", expected=f"{count} names", found=f"{len(names)} names"
        )
    return names


def _require_inherited(fd: int, count: int) -> None:
    try:
        found = "opened by this process itself" if not os.get_inheritable(fd) else None
    except OSError as error:
        found = error.strerror
    if found is not None:
        raise InvalidEnvironment(
            "a descriptor that LISTEN_FDS counts was not handed over",
            expected=f"{count} descriptors from {FIRST} up",
            found=f"descriptor {fd}: {found}",
            next_step="whatever stands between the service manager and weightcached must not close descriptors",
        )
