"""``weightcached serve``: from arguments to a running keeper, and the exit status in the end.

Owns the process: options, logs, limits, the event loop. Called by the command line only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import resource
import sys

import uvloop

from weightcached.daemon import log as logs
from weightcached.daemon.claim import take
from weightcached.daemon.keeper import Keeper
from weightcached.daemon.listen_fds import take_handed_over
from weightcached.daemon.notify import Notifier
from weightcached.daemon.options import ServeOptions, parse_serve
from weightcached.protocol.command_line import BUG_EXIT, USAGE_EXIT
from weightcached.protocol.errors import HolderDied, InvalidEnvironment, InvalidOption, WeightCacheError
from weightcached.protocol.processes import die_with_parent

_CANNOT_START_EXIT = 1
_LOST_EXIT = 1
_OWN_DESCRIPTORS = 64
"""Kept from clients: for the worker, the segments, helper processes, and what is exported to somebody right now."""

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Serve until a signal. Exit statuses are in the command's help."""
    try:
        options = parse_serve(argv)
    except WeightCacheError as error:
        print(f"weightcached serve: {error}", file=sys.stderr)
        return USAGE_EXIT if isinstance(error, InvalidOption) else _CANNOT_START_EXIT
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    logs.configure(format_name=options.log_format, level=options.log_level, place=str(options.place))
    try:
        options = _within_descriptors(options)
        handed = take_handed_over()
        notifier = Notifier.from_environment()
        claim = take(options.place, options.allowed)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(Keeper(options, claim, handed, notifier).run())
        finally:
            claim.unlink()
            claim.release()
            if notifier is not None:
                notifier.close()
    except HolderDied as error:
        log.error("cannot go on: %s", error, extra={"code": error.code})
        return _LOST_EXIT
    except WeightCacheError as error:
        log.error("cannot start: %s", error, extra={"code": error.code})
        return _CANNOT_START_EXIT
    except Exception:  # IllegalTransition above all: what the table does not have must not go on
        log.exception("a bug: the keeper ends")
        return BUG_EXIT
    return 0


def _within_descriptors(options: ServeOptions) -> ServeOptions:
    """Every engine costs a descriptor, and the usual soft limit is only there for programs that use select(). Raised as
    far as it goes, it may still be too low for as many connections as were asked for: clients must not take what the
    load needs. Raises InvalidEnvironment where nothing is left for clients.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    possible = hard - _OWN_DESCRIPTORS
    if possible < 1:
        raise InvalidEnvironment(
            "this process may not open enough files",
            expected=f"over {_OWN_DESCRIPTORS}",
            found=hard,
            next_step="raise its hard limit on open files (ulimit -Hn, LimitNOFILE=)",
        )
    if possible >= options.connections_max:
        return options
    log.warning(
        "fewer connections are taken than --connections-max says",
        extra={"wanted": options.connections_max, "possible": possible, "limit": hard},
    )
    return dataclasses.replace(options, connections_max=possible)
