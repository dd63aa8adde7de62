"""Starting a keeper: fork, put the kept descriptors where ``LISTEN_FDS`` says they are, exec.

Owns what happens between fork and exec. A plain fork is right here, and only here: this process has one thread, and
``LISTEN_PID`` has to be the pid of the very process that becomes the keeper.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from weightcached.daemon.listen_fds import FIRST
from weightcached.protocol.processes import die_with_parent

CANNOT_EXEC_EXIT = 127

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

log = logging.getLogger(__name__)


def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    names: Sequence[str],
    fds: Sequence[int],
    caught: Sequence[signal.Signals],
) -> int:
    """Start ``command`` and return its pid. It dies (SIGKILL) when this process does, and has a session of its own, so
    that Ctrl-C on a terminal reaches it once, through us.

    ``fds`` are its descriptors from 3 up, announced under ``names``; beside these it inherits 0, 1 and 2. ``caught``
    are the signals that have a handler here. Where the program cannot be run the child says so in the log and exits
    with 127. Does not wait for any of that. Raises OSError when there can be no new process.
    """
    # A signal that the child took before its handlers are gone would be reported through the wake-up pipe, which is
    # still ours at that moment.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, caught)
    parent_pid = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _become(command, dict(environment), names, fds, caught, before, parent_pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _become(
    command: Sequence[str],
    environment: dict[str, str],
    names: Sequence[str],
    fds: Sequence[int],
    caught: Sequence[signal.Signals],
    mask: Iterable[int],
    parent_pid: int,
) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for number in (*caught, *_IGNORED_BY_PYTHON):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setsid()
        die_with_parent(parent_pid)
        _place(fds)
        pid = str(os.getpid())
        if "WATCHDOG_USEC" in environment:
            environment["WATCHDOG_PID"] = pid
        if fds:
            environment |= {"LISTEN_PID": pid, "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": ":".join(names)}
        os.execvpe(command[0], list(command), environment)  # noqa: S606
    except BaseException as error:  # noqa: BLE001  # whatever it was must not unwind into the parent's code
        log.error("the keeper cannot be started", extra={"program": command[0], "reason": str(error)})
    finally:
        os._exit(CANNOT_EXEC_EXIT)


def _place(fds: Sequence[int]) -> None:
    """Copies of ``fds`` at 3, 4, … that exec leaves open. First all go out of the way of each other."""
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST + len(fds)) for fd in fds]
    for position, fd in enumerate(aside):
        os.dup2(fd, FIRST + position, inheritable=True)
