"""``weightcached generations``, ``pin``, ``unpin`` and ``drop``: what every rank of a group holds, and for how long.

Exit codes of ``generations``: 0 every rank is there and serves the same version · 1 not so, or a change is under way ·
2 nobody answers · 64 bad options. Of the others: 0 done · 2 not · 64 bad options.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from weightcached.client.control.commands import where_of
from weightcached.client.control.coordinator import held
from weightcached.client.control.group import Group, Where
from weightcached.client.control.holding import drop, pin
from weightcached.protocol.command_line import USAGE_EXIT, Parser
from weightcached.protocol.control import RankState
from weightcached.protocol.errors import InvalidOption, WeightCacheError
from weightcached.protocol.messages import GenerationInfo
from weightcached.protocol.place_options import NAME_OF_ONE, add_place_arguments
from weightcached.protocol.text import binary_size, duration, one_line, table
from weightcached.protocol.transaction import same_on_all

AGREED_EXIT = 0
DIFFERENT_EXIT = 1
FAILED_EXIT = 2

TIMEOUT_S = 30.0
_HEADING = ("RANK", "STANDING", "VERSION", "GENERATION", "ORIGIN", "SIZE", "LEASES", "PINNED", "AGE")
_SHORT = 12


def generations_main(argv: list[str]) -> int:
    """``weightcached generations``."""
    parser = Parser(
        prog="weightcached generations",
        description="What every rank of a group holds: what it serves, what it keeps for rollback, what is prepared.",
        epilog="A version is of content and configuration together: not what `weightcached digest` prints. It is\n"
        "called receipts:… until the content's digest is known, and digest:… from then on; commands take either.\n\n"
        "exit codes: 0 every rank is there and serves the same version; 1 not so, or a change is under way;\n"
        "2 nobody answers; 64 bad options",
    )
    parser.add_argument("--json", action="store_true", help="everything, as one JSON document")
    add_place_arguments(parser, name=NAME_OF_ONE)
    given = parser.parse_args(argv)

    async def look(where: Where) -> Group:
        return await where.group()

    group = _run(parser.prog, given, look)
    if isinstance(group, int):
        return group
    print(json.dumps(as_json(group)) if given.json else "\n".join(render(group)))
    return exit_code(group)


def pin_main(argv: list[str]) -> int:
    """``weightcached pin``."""
    return _pinned("pin", "Keep a version, whatever else would have it freed, until `unpin`.", argv, pinned=True)


def unpin_main(argv: list[str]) -> int:
    """``weightcached unpin``."""
    return _pinned(
        "unpin", "Keep a version no longer than needed; ends an adopted one's grace, too.", argv, pinned=False
    )


def drop_main(argv: list[str]) -> int:
    """``weightcached drop``."""
    parser = _parser("drop", "Free a version that is neither served nor part of a change.")
    parser.add_argument(
        "--force", action="store_true", help="also if pinned or leased: engines keep what they mapped, cannot resume"
    )
    given = parser.parse_args(argv)
    return _done(parser.prog, given, lambda where: drop(where, given.which, force=given.force))


def _pinned(command: str, description: str, argv: list[str], *, pinned: bool) -> int:
    parser = _parser(command, description)
    given = parser.parse_args(argv)
    return _done(parser.prog, given, lambda where: pin(where, given.which, pinned=pinned))


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"weightcached {command}", description=description, epilog="exit codes: 0 done; 2 not; 64 bad options"
    )
    parser.add_argument(
        "which",
        metavar="VERSION|GENERATION",
        help="a version; or one rank's generation of it, which stands for it at every rank; or its beginning",
    )
    add_place_arguments(parser, name=NAME_OF_ONE)
    return parser


def _done(prog: str, given: argparse.Namespace, what: Callable[[Where], Awaitable[Group]]) -> int:
    group = _run(prog, given, what)
    if isinstance(group, int):
        return group
    print("\n".join(render(group)))
    return 0


def _run(prog: str, given: argparse.Namespace, what: Callable[[Where], Awaitable[Group]]) -> Group | int:
    async def run() -> Group:
        return await what(where_of(given, timeout_s=TIMEOUT_S))

    try:
        return asyncio.run(run())
    except WeightCacheError as error:
        print(one_line(f"{prog}: {error}"), file=sys.stderr)
        return USAGE_EXIT if isinstance(error, InvalidOption) else FAILED_EXIT


def exit_code(group: Group) -> int:
    """The documented codes."""
    current = [state.generation(state.current) for _, state in group.states()]
    serving = [held(one) for one in current if one is not None]
    pending = any(state.open or (state.change is not None and _waits(state)) for _, state in group.states())
    agreed = len(serving) == len(group.members) and same_on_all(serving) and not pending
    return AGREED_EXIT if agreed else DIFFERENT_EXIT


def _waits(state: RankState) -> bool:
    return state.change is not None and state.change.state in ("preparing", "prepared")


def render(group: Group) -> list[str]:
    """The table, and under it what versions were called before their digest was known, who is missing, and which change
    is under way."""
    rows = [_row(member.word, one) for member, state in group.states() for one in state.generations]
    lines = table([_HEADING, *rows])
    named = dict.fromkeys(
        (one.version, one.receipts_version) for _, state in group.states() for one in state.generations
    )
    lines += [f"{_shortened(now)} is also {_shortened(then)}" for now, then in named if now != then]
    lines += [f"{word}: no daemon answers" for word in group.missing]
    lines += [f"{place}: {error}" for place, error in group.silent.items()]
    for member, state in group.states():
        if not state.generations:
            lines.append(f"{member.word}: {state.state}, and holds no weights")
        if state.open is not None:
            lines.append(f"{member.word}: change {state.open} is open")
        if state.change is not None and state.change.state in ("preparing", "prepared", "failed"):
            why = f": {state.change.error}" if state.change.error else ""
            lines.append(f"{member.word}: change {state.change.transaction} is {state.change.state}{why}")
    return [one_line(line) for line in lines]


def _row(word: str, one: GenerationInfo) -> tuple[str, ...]:
    for_a_while = one.pinned and one.pinned_for_s is not None
    pinned = f"{one.pinned_for_s:.0f} s more" if for_a_while else ("yes" if one.pinned else "no")
    return (
        word,
        one.standing,
        _shortened(one.version),
        one.generation[:_SHORT],
        one.origin,
        binary_size(one.resident_nbytes),
        str(one.leases),
        pinned,
        duration(one.age_s),
    )


def _shortened(version: str) -> str:
    kind, _, rest = version.rpartition(":")
    return f"{kind}:{rest[:_SHORT]}" if kind else rest[:_SHORT]


def as_json(group: Group) -> dict[str, Any]:
    """Everything that is known of the group."""
    return {
        "name": group.name,
        "runtime_dir": str(group.runtime_dir),
        "missing": group.missing,
        "ranks": [{"rank": member.word, **state.model_dump(mode="json")} for member, state in group.states()],
    }
