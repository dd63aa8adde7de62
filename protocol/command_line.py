"""What every ``weightcached`` command has in common: how options are parsed, and the exit statuses that mean the same.

Owns :class:`Parser`, the shared exit statuses, and values that many options take: seconds, whole numbers, users and
groups by name. What a command accepts, and its other statuses, are its own.
"""

from __future__ import annotations

import argparse
import grp
import pwd
import re
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.places import place_name

USAGE_EXIT = 64
"""Options that cannot be used (sysexits' EX_USAGE), apart from the small numbers that commands give a meaning."""

BUG_EXIT = 70
"""An error that is ours (EX_SOFTWARE)."""

INTERRUPTED_EXIT = 128 + signal.SIGINT
"""As of a process that SIGINT ends."""

_DAY_S = 86400


class Parser(argparse.ArgumentParser):
    """An argument parser that exits with :data:`USAGE_EXIT`, and never guesses an abbreviated option."""

    def __init__(self, *, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE_EXIT, f"{self.prog}: {message}\n")


def seconds(text: str) -> float:
    """A duration from 0 to a day, so that it can be waited for. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _DAY_S:  # nor NaN
        raise argparse.ArgumentTypeError(f"seconds from 0 to {_DAY_S} are expected, not {text!r}")
    return value


def positive_seconds(text: str) -> float:
    """Like :func:`seconds`, but not 0. Raises ArgumentTypeError."""
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f"seconds over 0 are expected, not {text!r}")
    return value


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """What converts an option's text to a number from ``low`` to ``high``. It raises ArgumentTypeError."""
    expected = f"of at least {low}" if high is None else f"from {low} to {high}"

    def convert(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,18}", text) or not low <= int(text) <= (sys.maxsize if high is None else high):
            raise argparse.ArgumentTypeError(f"a whole number {expected} is expected, not {text!r}")
        return int(text)

    return convert


def name_of_place(text: str) -> str:
    """A name that a place can have. Raises ArgumentTypeError."""
    try:
        return place_name(text)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def user_id(text: str) -> int:
    """A user id from a number or a name. Raises ArgumentTypeError."""
    return _id(text, lambda name: pwd.getpwnam(name).pw_uid)


def group_id(text: str) -> int:
    """A group id from a number or a name. Raises ArgumentTypeError."""
    return _id(text, lambda name: grp.getgrnam(name).gr_gid)


def _id(text: str, look_up: Callable[[str], int]) -> int:
    try:
        value = int(text) if re.fullmatch("-?[0-9]+", text) else look_up(text)
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"there is no {text!r} on this machine") from error
    if not 0 <= value < 2**32 - 1:
        raise argparse.ArgumentTypeError("a user or group id is expected")
    return value
