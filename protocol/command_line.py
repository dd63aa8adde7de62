"""What every ``weightcached`` command has in common: how options are parsed, and the exit statuses that mean the same.

Owns :class:`Parser`, the two shared exit statuses, and values that several commands take: users and groups by name,
quantizations. What a command accepts, and its other
statuses, are its own.
"""

from __future__ import annotations

import argparse
import grp
import pwd
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.quantization import Quantization

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


def user_id(text: str) -> int:
    """A user id from a number or a name. Raises ArgumentTypeError."""
    return _id(text, lambda name: pwd.getpwnam(name).pw_uid)


def group_id(text: str) -> int:
    """A group id from a number or a name. Raises ArgumentTypeError."""
    return _id(text, lambda name: grp.getgrnam(name).gr_gid)


def quantization(text: str) -> str:
    """One of the spellings that `Quantization.named` takes, as it is. Raises ArgumentTypeError."""
    try:
        Quantization.named(text)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _id(text: str, look_up: Callable[[str], int]) -> int:
    try:
        value = int(text) if re.fullmatch("-?[0-9]+", text) else look_up(text)
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"there is no {text!r} on this machine") from error
    if not 0 <= value < 2**32 - 1:
        raise argparse.ArgumentTypeError("a user or group id is expected")
    return value
