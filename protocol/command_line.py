"""What every ``weightcached`` command has in common: how options are parsed, and the exit statuses that mean the same.

Owns :class:`Parser`, the two shared exit statuses, numbers of seconds and of things, and users and groups by name. What
a command accepts, and its other statuses, are its own.
"""

from __future__ import annotations

import argparse
import grp
import pwd
import re
import sys
from collections.abc import Callable
from typing import NoReturn

USAGE_EXIT = 64
"""Options that cannot be used (sysexits' EX_USAGE), apart from the small numbers that commands give a meaning."""

BUG_EXIT = 70
"""An error that is ours (EX_SOFTWARE)."""


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
    """Seconds, up to a day: what every wait below can be told. Raises ArgumentTypeError."""
    value = _number(text)
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError("seconds, at most 86400, are expected")
    return value


def positive_seconds(text: str) -> float:
    """Seconds where none would leave no time at all. Raises ArgumentTypeError."""
    value = _number(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError("seconds, over 0 and at most 86400, are expected")
    return value


def positive(text: str) -> int:
    """A number of things. Raises ArgumentTypeError."""
    value = int(text) if re.fullmatch("-?[0-9]{1,18}", text) else 0
    if value < 1:
        raise argparse.ArgumentTypeError("a whole number, at least 1, is expected")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error


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
