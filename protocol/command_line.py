"""What every ``weightcached`` command has in common: how options are parsed, and the exit statuses that mean the same.

Owns :class:`Parser` and the two shared exit statuses. What a command accepts, and its other statuses, are its own.
"""

from __future__ import annotations

import argparse
import sys
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
