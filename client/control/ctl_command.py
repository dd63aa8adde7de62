"""``weightcached ctl COMMAND``: one command of the control plane to one or many daemons, and their answers as JSON.

Owns the options, which places a command goes to, and the exit codes. Nothing is decided here: what a command means is
the daemon's business, and what makes a change of all ranks is `weightcached update`'s: nothing is committed here, for
that takes a look at every rank.

Exit codes: 0 every place has answered · 1 some refused, or could not be asked · 3 there is nobody to ask · 64 bad
options.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weightcached.protocol.command_line import USAGE_EXIT, Parser, positive_seconds
from weightcached.protocol.control import (
    AwaitChange,
    Decide,
    Decided,
    Describe,
    Drop,
    Pin,
    RankState,
    ReadDecision,
    Resolve,
)
from weightcached.protocol.control_channel import ask
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import InvalidOption, WeightCacheError
from weightcached.protocol.messages import Message, Report, Status
from weightcached.protocol.named_places import add_rank_arguments, named_places, nobody_there, places_with_socket
from weightcached.protocol.peers import AllowList
from weightcached.protocol.place_options import NAME_OF_SOME, add_place_arguments, allow_list
from weightcached.protocol.places import Place, runtime_directory
from weightcached.protocol.text import one_line

ANSWERED_EXIT, REFUSED_EXIT, NOBODY_EXIT = 0, 1, 3

_AWAIT_MAX_S = 3600.0


@dataclass(frozen=True)
class Command:
    """What is sent, what comes back, and to whom: every place that was named, or those of them that are ``meant``."""

    make: Callable[[argparse.Namespace], Message]
    answer: type[Message]
    text: str
    meant: Callable[[RankState, argparse.Namespace], bool] | None = None
    about: str | None = None
    """``transaction`` or ``generation``: its argument."""


def _is_leader(state: RankState, given: argparse.Namespace) -> bool:
    return state.rank.is_leader


def _holds(state: RankState, given: argparse.Namespace) -> bool:
    return state.generation(given.generation) is not None


COMMANDS: dict[str, Command] = {
    "describe": Command(lambda _: Describe(), RankState, "which generations a rank holds, and the change it works at"),
    "status": Command(lambda _: Status(), Report, "everything that `weightcached status --json` says"),
    "await": Command(
        lambda given: AwaitChange(transaction=given.transaction, timeout_s=min(given.timeout, _AWAIT_MAX_S)),
        RankState,
        "answered once a rank no longer prepares the change, or after --timeout",
        about="transaction",
    ),
    "read-decision": Command(
        lambda given: ReadDecision(transaction=given.transaction),
        Decided,
        "what rank 0's record says about a change",
        meant=_is_leader,
        about="transaction",
    ),
    "decide": Command(
        lambda given: Decide(transaction=given.transaction, commit=False),
        Decided,
        "have rank 0 write down --abort; to commit, `weightcached update --resolve`: it looks at every rank",
        meant=_is_leader,
        about="transaction",
    ),
    "resolve": Command(
        lambda given: Resolve(transaction=given.transaction),
        RankState,
        "have a rank read rank 0's record now, and act upon it",
        about="transaction",
    ),
    "pin": Command(
        lambda given: Pin(generation=given.generation, pinned=True),
        RankState,
        "keep a generation at the rank that holds it, whatever would have it freed",
        meant=_holds,
        about="generation",
    ),
    "unpin": Command(
        lambda given: Pin(generation=given.generation, pinned=False),
        RankState,
        "keep it no longer than needed",
        meant=_holds,
        about="generation",
    ),
    "drop": Command(
        lambda given: Drop(generation=given.generation, force=given.force),
        RankState,
        "free a generation; with --force one that is pinned or leased",
        meant=_holds,
        about="generation",
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What one place said. ``answer`` is ``None`` where it was ``error``, or where the command was not meant for it."""

    place: Place
    answer: Message | None = None
    error: WeightCacheError | None = None

    def as_json(self) -> dict[str, Any]:
        if self.error is not None:
            return {"place": str(self.place), "error": self.error.as_fields()}
        return {"place": str(self.place), "answer": self.answer.model_dump(mode="json") if self.answer else None}


async def command(
    places: Sequence[Place], chosen: Command, given: argparse.Namespace, *, allowed: AllowList
) -> list[Outcome]:
    """Ask all ``places`` at once; what those said for whom the command is meant, and those that could not be asked."""
    request = chosen.make(given)
    deadline = Deadline.after(given.timeout + (given.patience if isinstance(request, AwaitChange) else 0))

    async def one(place: Place) -> Outcome | None:
        try:
            if chosen.meant is not None:
                state = await ask(
                    place, Describe(), RankState, deadline=deadline, patience_s=given.patience, allowed=allowed
                )
                if not chosen.meant(state, given):
                    return None
            answer = await ask(
                place, request, chosen.answer, deadline=deadline, patience_s=given.patience, allowed=allowed
            )
        except WeightCacheError as error:
            return Outcome(place, error=error)
        return Outcome(place, answer)

    return [outcome for outcome in await asyncio.gather(*map(one, places)) if outcome is not None]


def _parser() -> Parser:
    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="weightcached ctl",
        description="Send one command to the daemons of the ranks that are named, or else of every place of the\n"
        "runtime directory (with --name: of that name), and print their answers as JSON. Only root and a daemon's\n"
        "own user may. Every command may be sent again: it then finds what it has done already.\n\n"
        + "\n".join(f"  {name:{width}}  {one.text}" for name, one in COMMANDS.items()),
        epilog="exit codes: 0 every place has answered; 1 some refused, or could not be asked; 3 there is nobody to\n"
        "ask; 64 bad options",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("about", nargs="?", metavar="ID", help="the transaction or generation (32 hexadecimal digits)")
    parser.add_argument("--abort", action="store_true", help="of decide, which takes nothing else")
    parser.add_argument("--force", action="store_true", help="of drop")
    add_place_arguments(parser, name=NAME_OF_SOME)
    add_rank_arguments(parser)
    parser.add_argument(
        "--timeout", type=positive_seconds, default=30.0, metavar="S", help="for each answer (default: 30)"
    )
    parser.add_argument(
        "--patience",
        type=positive_seconds,
        default=5.0,
        metavar="S",
        help="for a daemon that is starting, or is started again (default: 5)",
    )
    return parser


def _checked(given: argparse.Namespace) -> Command:
    """Its arguments fit the command. Raises InvalidOption."""
    chosen = COMMANDS[given.command]
    if (given.about is None) is not (chosen.about is None):
        found = given.about or "nothing"
        raise InvalidOption(f"`ctl {given.command}` is about {chosen.about or 'nothing in particular'}", found=found)
    if chosen.about is not None:
        setattr(given, chosen.about, given.about)
        if len(given.about) != 32 or not set(given.about) <= set("0123456789abcdef"):
            raise InvalidOption(f"not a {chosen.about}", expected="32 hexadecimal digits", found=given.about)
    if given.abort is not (given.command == "decide"):
        raise InvalidOption(
            "--abort goes with `ctl decide`, and with nothing else",
            next_step="to commit what all have prepared, `weightcached update --resolve`, which looks at them all",
        )
    if given.force and given.command != "drop":
        raise InvalidOption("--force goes with `ctl drop` only")
    return chosen


def main(argv: list[str]) -> int:
    """Ask, print, and return the exit code."""
    given = _parser().parse_intermixed_args(argv)  # an ID may stand behind options, too
    try:
        chosen = _checked(given)
        runtime_dir = runtime_directory(given.runtime_dir)
        named = named_places(given, runtime_dir)
        places = named if named is not None else places_with_socket(runtime_dir, given.name)
    except WeightCacheError as error:
        print(one_line(f"weightcached ctl: {error}"), file=sys.stderr)
        return USAGE_EXIT if isinstance(error, InvalidOption) else REFUSED_EXIT
    outcomes = asyncio.run(command(places, chosen, given, allowed=allow_list(given)))
    print(json.dumps([outcome.as_json() for outcome in outcomes], indent=2))
    if not outcomes:
        nobody = nobody_there(runtime_dir, given.name) if not places else f"this is about none of {len(places)} daemons"
        print(one_line(f"weightcached ctl: {nobody}"), file=sys.stderr)
        return NOBODY_EXIT
    return REFUSED_EXIT if any(outcome.error is not None for outcome in outcomes) else ANSWERED_EXIT
