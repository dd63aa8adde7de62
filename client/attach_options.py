"""The options of commands that start an engine, about its attach: the same words on each of them.

What is not given is None, and has its default where the engine's options are owned.
"""

from __future__ import annotations

import argparse

from weightcached.protocol.command_line import seconds


def add_attach_arguments(parser: argparse.ArgumentParser) -> None:
    """``--digest``, ``--timeout``, ``--wait-for-daemon`` and ``--on-stale``."""
    add = parser.add_argument
    add(
        "--digest",
        metavar="HEX",
        help="the content expected, where the daemon's checkpoint is not visible from here: the first word that "
        "`weightcached digest` prints",
    )
    add(
        "--timeout",
        dest="timeout_s",
        type=seconds,
        metavar="S",
        help="for the weights, in all (default: 600)",
    )
    add(
        "--wait-for-daemon",
        dest="wait_for_daemon_s",
        type=seconds,
        metavar="S",
        help="how long an absent daemon may take to bind its socket before it counts as absent (default: 0)",
    )
    add(
        "--on-stale",
        choices=("keep", "exit"),
        help="when the daemon was started anew and serves other weights: keep those at hand, or exit, to be started "
        "again by a supervisor (default: keep)",
    )
