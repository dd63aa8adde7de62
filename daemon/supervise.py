"""``weightcached supervise``: from arguments to a running supervisor, and the exit status in the end.

Owns the process: options, logs, signals, limits. Called by the command line only. A vault for hosts without systemd;
what it promises, and what not, is said in ``supervisor/supervisor.py``.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from weightcached.daemon import log as logs
from weightcached.daemon.stopping import stop_signals
from weightcached.daemon.supervisor.mailbox import Mailbox
from weightcached.daemon.supervisor.options import parse
from weightcached.daemon.supervisor.post import Post
from weightcached.daemon.supervisor.store import Store
from weightcached.daemon.supervisor.supervisor import CAUGHT, Supervisor
from weightcached.daemon.supervisor.upward import Upward
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.processes import die_with_parent

_CANNOT_START_EXIT = 1
_OWN_DESCRIPTORS = 64

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Supervise until the keeper ends well or a signal ends it. Exit statuses are in the command's help."""
    options = parse(argv)
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    logs.configure(format_name=options.log_format, level=options.log_level, place=f"supervisor {os.getpid()}")
    _keep_strangers_out()
    with ExitStack() as held:
        wake_fd = _catch_signals(held)
        try:
            upward = held.enter_context(closing(Upward(os.environ)))
            mailbox = held.enter_context(closing(Mailbox(Path(os.environ.get("TMPDIR") or "/tmp"))))  # noqa: S108
        except WeightCacheError as error:
            print(f"weightcached supervise: {error}", file=sys.stderr)
            return _CANNOT_START_EXIT
        store = held.enter_context(closing(Store(limit=_store_limit(options.store_max))))
        return Supervisor(options, post=Post(mailbox, store), store=store, upward=upward, wake_fd=wake_fd).run()


def _keep_strangers_out() -> None:
    """Descriptors that we were started with beside 0, 1 and 2 are nothing for the keeper."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2:
                os.set_inheritable(int(name), False)
        except OSError:  # the list's own
            continue


def _catch_signals(held: ExitStack) -> int:
    """The descriptor on which the number of each signal arrives as a byte."""
    pipe = held.enter_context(OwnedFds(os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)))
    signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
    held.callback(signal.set_wakeup_fd, -1)
    held.callback(stop_signals, block=True)  # one that comes after the end must not become the exit status
    for number in CAUGHT:
        signal.signal(number, lambda *_: None)
    return pipe[0]


def _store_limit(wanted: int) -> int:
    """As many descriptors as wanted, or as many as can be had: while a keeper is started each is there twice."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    possible = max(0, hard - _OWN_DESCRIPTORS) // 2
    if possible < wanted:
        log.warning(
            "fewer descriptors can be kept than --store-max says",
            extra={"wanted": wanted, "possible": possible, "limit": hard},
        )
    return min(wanted, possible)
