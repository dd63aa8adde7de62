"""The options that say at which place a daemon is, and whom to trust there: the same words on every command."""

from __future__ import annotations

import argparse

from weightcached.protocol.command_line import group_id, name_of_place, user_id
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import DEFAULT_NAME

NAME_OF_ONE = f"tells several daemons of a directory apart (default: {DEFAULT_NAME})"
NAME_OF_SOME = f"those of this name only (default: every name; with a size: {DEFAULT_NAME})"
NAME_OF_ALL = "those of this name only (default: every name)"


def add_place_arguments(parser: argparse.ArgumentParser, *, name: str) -> None:
    """``--runtime-dir``, ``--name`` and whom to trust: the options that every command about a place has. What a name
    means differs: ``name`` is its help.
    """
    group = parser.add_argument_group("place")
    group.add_argument(
        "--runtime-dir", metavar="DIR", help="default: $WEIGHTCACHED_RUNTIME_DIR, else /run/weightcached"
    )
    group.add_argument("--name", type=name_of_place, help=name)
    group.add_argument(
        "--allow-uid",
        metavar="USER",
        type=user_id,
        action="append",
        default=[],
        help="trust this user, beside root and this one (repeatable)",
    )
    group.add_argument(
        "--allow-gid", metavar="GROUP", type=group_id, action="append", default=[], help="and this group (repeatable)"
    )


def allow_list(given: argparse.Namespace) -> AllowList:
    """Who is trusted beside root and ourselves."""
    return AllowList(frozenset(given.allow_uid), frozenset(given.allow_gid))
