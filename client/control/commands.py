"""``weightcached update`` and ``weightcached rollback``: other weights at all ranks of a group, or at none.

Exit codes: 0 every rank serves it · 1 not now: another change is under way, the time is over, a rank is silent or died,
or files changed while they were read; nothing changed, and trying again may help · 2 it cannot be done, and nothing
changed · 3 it is committed, and ranks that are away will read so themselves · 4 rank 0
was asked to commit, or to give up after an interruption, and does not answer: `update --resolve` finds out · 64 bad
options.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from weightcached.client.control.changes import KEEP_MAX, Changed, current_version, resolve, rollback, update
from weightcached.client.control.coordinator import Step, Told
from weightcached.client.control.course import Course, Phase
from weightcached.client.control.group import TIMEOUT_S, Group, Where
from weightcached.protocol.command_line import USAGE_EXIT, Parser, seconds, whole_number
from weightcached.protocol.errors import (
    CheckpointChanged,
    DaemonDraining,
    DaemonUnreachable,
    DecisionUnknown,
    HolderDied,
    InvalidOption,
    NotReadyError,
    WeightCacheError,
    WorkerDied,
)
from weightcached.protocol.place_options import NAME_OF_ONE, add_place_arguments, allow_list
from weightcached.protocol.places import DEFAULT_NAME
from weightcached.protocol.text import binary_size, one_line

DONE_EXIT = 0
NOT_NOW_EXIT = 1
FAILED_EXIT = 2
AWAY_EXIT = 3
UNKNOWN_EXIT = 4

_EXIT_CODES = (
    "exit codes: 0 every rank serves it; 1 not now: another change is under way, the time is over, a rank is silent\n"
    "or a process of it died, or files changed while they were read: try again; 2 it cannot be done (after 1 and 2\n"
    "nothing that is served has changed by it); 3 it is committed, and ranks that were not seen to serve it will\n"
    "read so themselves; 4 rank 0 was asked to commit and does not answer: --resolve finds out; 64 bad options.\n"
    "Ctrl-C, SIGTERM or a closed terminal (not under nohup) gives up what is being prepared: 1; once that is being\n"
    "decided, or where rank 0 does not confirm it: 4. 74 or 141 where standard output cannot be written: they do\n"
    "not say what became of it. Standard error may be lost: it goes on all the same"
)
_WORDS = {
    Phase.LOOK: "looking at every rank",
    Phase.OPEN: "opening the change at rank 0",
    Phase.PREPARE: "preparing on every rank",
    Phase.COMMIT: "every rank is prepared: committing",
    Phase.ABORT: "ending the change without a commit",
    Phase.APPLY: "telling every rank",
}
_Change = Callable[[argparse.Namespace, Where, Told], Coroutine[Any, Any, int]]
_NOT_NOW = (NotReadyError, DaemonUnreachable, DaemonDraining, WorkerDied, HolderDied, CheckpointChanged)
"""Errors that the same command may not meet when it is given again: somebody is away, or died, or was still writing.
A place without any daemon (DaemonAbsent) is none of them: nobody is known to come back there.
"""


def update_main(argv: list[str]) -> int:
    """``weightcached update``."""
    parser = Parser(
        prog="weightcached update",
        description="Have all ranks of a group load MODEL beside what they serve, verify it, and switch: all or none.\n"
        "What was served stays for `weightcached rollback`. With --resolve and no model: end what another left,\n"
        "committed if every rank has it prepared, else given up.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument(
        "--model", metavar="DIR|HUB_ID", help="a checkpoint directory that the daemons see, or a hub id"
    )
    parser.add_argument(
        "--keep",
        type=whole_number(0, KEEP_MAX),
        metavar="N",
        help="earlier generations to keep (default: the daemons')",
    )
    _add_common(parser)
    given = parser.parse_args(argv)
    if given.model is None and not given.resolve:
        parser.error("--model is required, or --resolve to end what another coordinator left")
    return _run(parser.prog, given, _updated)


def rollback_main(argv: list[str]) -> int:
    """``weightcached rollback``."""
    parser = Parser(
        prog="weightcached rollback",
        description="Have all ranks of a group serve a version again that they hold, without loading: all or none.\n"
        "Without --to it takes back what is served when it is given: with --wait, a change that ends meanwhile may\n"
        "have done that already (0), or have put another version in its place, which is left there (2).",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--to", metavar="VERSION", help="or its beginning (default: the one before this one)")
    _add_common(parser)
    return _run(parser.prog, parser.parse_args(argv), _rolled_back)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=TIMEOUT_S,
        metavar="S",
        help="to be prepared in; giving up takes six seconds more at most, deciding and telling all thirty "
        f"(default: {TIMEOUT_S:.0f})",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait for ranks that still load or are away, and for a change that is under way",
    )
    parser.add_argument(
        "--resolve",
        action="store_true",
        help="first give up a change that is open, whoever began it, and however far it has come",
    )
    parser.add_argument("--align", action="store_true", help="also where ranks serve different versions now")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    add_place_arguments(parser, name=NAME_OF_ONE)


async def _updated(given: argparse.Namespace, where: Where, told: Told) -> int:
    if given.model is None:
        return _show_resolved(*await resolve(where, told=told))
    options = {"wait": given.wait, "force": given.resolve, "align": given.align}
    return _show(await update(where, given.model, keep=given.keep, told=told, **options))


async def _rolled_back(given: argparse.Namespace, where: Where, told: Told) -> int:
    options = {"wait": given.wait, "force": given.resolve, "align": given.align}
    return _show(await rollback(where, given.to, told=told, **options))


def _run(prog: str, given: argparse.Namespace, what: _Change) -> int:
    shown = Shown(prog, quiet=given.quiet)
    try:
        where = where_of(given, timeout_s=given.timeout)
        return asyncio.run(_cancelled_by_signals(what(given, where, shown)))
    except WeightCacheError as error:
        print(one_line(f"{prog}: {error}"), file=sys.stderr)
        if isinstance(error, InvalidOption):
            return USAGE_EXIT
        if isinstance(error, DecisionUnknown):
            return UNKNOWN_EXIT
        return NOT_NOW_EXIT if isinstance(error, _NOT_NOW) else FAILED_EXIT
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _interrupted(prog, shown)


async def _cancelled_by_signals(work: Coroutine[Any, Any, int]) -> int:
    """``work``, which Ctrl-C, SIGTERM and a terminal that is closed cancel. Whatever comes after the first is ignored:
    giving up is soon over. So is SIGHUP under ``nohup``.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def cancel(_: int, __: object) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        if task is not None:
            task.cancel()
        loop.call_soon_threadsafe(lambda: None)  # wakes the loop, which may be waiting

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, cancel)
    try:
        return await work
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(prog: str, shown: Shown) -> int:
    """A coordinator that is told to stop gives up what is not decided; afterwards it is rank 0's record that counts."""
    if shown.asked:
        print(
            f"{prog}: interrupted while it was decided: it is committed on every rank, or on none; next step: "
            "`weightcached update --resolve` ends it and says which",
            file=sys.stderr,
        )
        return UNKNOWN_EXIT
    if shown.left:
        print(
            f"{prog}: interrupted, and rank 0 did not confirm that what it was preparing is given up: it may still be "
            "open; next step: `weightcached update --resolve` ends it and says how",
            file=sys.stderr,
        )
        return UNKNOWN_EXIT
    print(
        f"{prog}: interrupted: nothing that is served has changed by it, and what it was preparing is given up; see "
        "`weightcached generations`",
        file=sys.stderr,
    )
    return NOT_NOW_EXIT


def where_of(given: argparse.Namespace, *, timeout_s: float) -> Where:
    """The group that the place options name."""
    return Where.of(
        runtime_dir=given.runtime_dir, name=given.name or DEFAULT_NAME, timeout_s=timeout_s, allowed=allow_list(given)
    )


def _show(changed: Changed) -> int:
    if changed.already:
        print(f"{changed.version} is served by every rank already: nothing is changed")
        return DONE_EXIT
    took = f"{_instead(changed)} ({changed.seconds:.1f} s)"
    if not changed.away:
        print(f"{changed.version} is served by every rank, {took}")
        return DONE_EXIT
    seen, unseen = ", ".join(changed.serving) or "none", ", ".join(changed.away)
    print(f"{changed.version} is committed, {took}; seen to serve it: {seen}; not seen yet: {unseen}")
    step = "next step: `weightcached generations` shows when they do"
    print(f"not seen to serve it yet: {unseen}; each will by itself, as rank 0's record says; {step}", file=sys.stderr)
    return AWAY_EXIT


def _instead(changed: Changed) -> str:
    """What was served before, by every rank."""
    others = "as before" if changed.version == changed.before else f"instead of {changed.before}"
    if not changed.differed:
        return others
    some = ", ".join(f"instead of {version} on {word}" for word, version in changed.differed)
    return f"{some}, {others} on the others"


def _show_resolved(group: Group, course: Course) -> int:
    away = {group.members[rank].word for rank in course.away} | {*group.missing}
    if course.outcome is not None:
        done = "committed" if course.outcome.is_commit else "given up"
        serves = f"serves {current_version(group)}" if group.leader.state is not None else "does not answer now"
        print(f"what was left is {done}: rank 0 {serves}")
    if course.failure is not None:
        at = f"{group.members[course.failure.rank].word}: " if course.failure.rank is not None else ""
        print(one_line(f"{at}{course.failure.why}"), file=sys.stderr)
        return AWAY_EXIT
    if not away:
        print("no change is under way")
        return DONE_EXIT
    print(f"no change is open; {', '.join(sorted(away))} will read rank 0's record when back", file=sys.stderr)
    return AWAY_EXIT


class Shown:
    """Progress for people, on standard error: a line for each step, and for each rank when its stage changes. Quiet,
    it only knows whether anything may be committed, or be open still.
    """

    def __init__(self, prog: str, *, quiet: bool = False) -> None:
        self._prog = prog
        self._quiet = quiet
        self._said: dict[str, str] = {}
        self.asked = False
        self.left = False

    def __call__(self, step: Step) -> None:
        self.asked, self.left = step.asked, step.left
        if self._quiet or step.left:
            return
        if step.waits_for:
            self._say("another", f"waiting for the end of another change, somebody else's: {step.waits_for}")
        elif not step.reports and step.phase in _WORDS:
            self._say("", _WORDS[step.phase])
        for word, report in step.reports:
            done = ""
            if report.bytes_total:
                percent = 100 * report.bytes_done // report.bytes_total // 10 * 10
                done = f" {percent} % of {binary_size(report.bytes_total)}"
            self._say(word, f"{word}: {report.stage}{done}")

    def _say(self, key: str, text: str) -> None:
        if self._said.get(key) != text:
            self._said[key] = text
            print(one_line(f"{self._prog}: {text}"), file=sys.stderr, flush=True)
