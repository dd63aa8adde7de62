"""``weightcached serve``: from arguments to a running keeper, and the exit status in the end.

Owns the process: options, logs, limits, the event loop. Called by the command line only.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys

import uvloop

from weightcached.daemon import log as logs
from weightcached.daemon.claim import take
from weightcached.daemon.keeper import Keeper
from weightcached.daemon.listen_fds import take_handed_over
from weightcached.daemon.notify import Notifier
from weightcached.daemon.options import parse_serve
from weightcached.protocol.command_line import BUG_EXIT, USAGE_EXIT
from weightcached.protocol.errors import InvalidOption, WeightCacheError
from weightcached.protocol.processes import die_with_parent

_CANNOT_START_EXIT = 1

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
    _raise_descriptor_limit()
    try:
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
    except WeightCacheError as error:
        log.error("cannot start: %s", error, extra={"code": error.code})
        return _CANNOT_START_EXIT
    except Exception:  # IllegalTransition above all: what the table does not have must not go on
        log.exception("a bug: the keeper ends")
        return BUG_EXIT
    return 0


def _raise_descriptor_limit() -> None:
    """Every engine costs a descriptor, and the usual soft limit is only there for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
