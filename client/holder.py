"""What an engine does when the process whose memory it reads has ended: it stops, within a bound.

Owns watching a holder (memory kind ``cuda-ipc``: :mod:`weightcached.protocol.memory.cuda_ipc`) for as long as anything
of its memory is open here, and ending this process. The descriptor that tells came with the grant: the kernel makes it
readable when the holder has ended, whatever that died of, across containers and PID namespaces. A thread of its own
waits for nothing else, so no callback of a lease and no other daemon can delay it. What can is code that keeps
Python's interpreter lock and does not return, and a stopped engine (SIGSTOP).

From the holder's end to this process's end reads are undefined, and so is whatever was computed from them.
"""

from __future__ import annotations

import os
import re
import select
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Literal

from weightcached.client import forks
from weightcached.client.ending import end_process
from weightcached.client.wake import Ended, Wake
from weightcached.protocol.errors import HolderDied, InvalidOption, TransferError

OnHolderLost = Literal["exit"] | Callable[[str], object]
"""``exit``: end the process with :data:`HOLDER_LOST_EXIT`. A function is called first, with the reason, to stop the
engine in its own way; the process is ended when it returns, and after :data:`LAST_WORDS_S` where it does not."""

HOLDER_LOST_EXIT = 69
"""Exit status of a process whose weights are gone: EX_UNAVAILABLE of sysexits, "a support program is unavailable"."""

LAST_WORDS_S = 1.0
_WRITING_S = 0.25
"""For saying why on a standard error that nobody may read."""
_HURRY_S = 1e-5
_LOOKS_S = 3600.0
"""It waits for an event; this only has to be something that poll() takes."""

_PIDFD = re.compile(r"anon_inode:\[pidfd\]|pidfd:\[\d+\]")


def checked_policy(on_holder_lost: OnHolderLost) -> OnHolderLost:
    """``on_holder_lost`` itself. InvalidOption when it is no policy."""
    if on_holder_lost != "exit" and not callable(on_holder_lost):
        raise InvalidOption(
            "unknown on_holder_lost",
            expected="'exit', or a function of (reason), after which the process is ended, too",
            found=repr(on_holder_lost),
        )
    return on_holder_lost


def require_process(fd: int, *, where: str) -> None:
    """TransferError for a descriptor that is not a process's."""
    found = os.readlink(f"/proc/self/fd/{fd}")
    if not _PIDFD.fullmatch(found):
        message = "what came for watching the holder of the weights is not a process"
        raise TransferError(message, expected="a pidfd", found=found, where=where)


def require_alive(fd: int, *, where: str) -> None:
    """HolderDied where the process has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):
        raise HolderDied(
            "the process that held the weights ended before they were attached",
            expected="memory that is there as long as we read it",
            where=where,
            next_step="attach again when the daemon has loaded them anew; its log says why that process ended",
        )


class HolderWatch:
    """Watches until it is ended, or nobody refers to it any more. ``pidfd`` is taken over.

    Whatever has the holder's memory open here refers to it. A forked child is not ended: it has none of the memory.
    """

    def __init__(self, pidfd: int, *, where: str, on_lost: OnHolderLost = "exit") -> None:
        self._wake = Wake()
        self._pidfd = pidfd
        self._end = weakref.finalize(self, self._wake.end)
        thread = threading.Thread(
            target=_watch, args=(self._wake, pidfd, where, on_lost), name="weightcached-holder", daemon=True
        )
        try:
            forks.in_child(self, HolderWatch._let_go_in_child)
            thread.start()
        except BaseException:
            self._end()
            os.close(pidfd)
            raise

    def _let_go_in_child(self) -> None:
        self._end.detach()
        self._wake.let_go_in_child()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _watch(wake: Wake, pidfd: int, where: str, on_lost: OnHolderLost) -> None:
    """The thread's life. It refers to nothing that refers to the memory: that would keep it open."""
    try:
        while not wake.wait(_LOOKS_S, on=pidfd):
            pass
    except Ended:
        wake.close()
        os.close(pidfd)
        return
    # From here on every step has to have the interpreter's lock again: threads that compute shall not keep it long.
    sys.setswitchinterval(_HURRY_S)
    reason = f"the process that held the weights of {where} has ended, and they are gone"
    words = f"{reason}: this process ends with status {HOLDER_LOST_EXIT}, before it computes with what is there now"
    if callable(on_lost):
        end_process(HOLDER_LOST_EXIT, words, within_s=LAST_WORDS_S, first=lambda: on_lost(reason))
    end_process(HOLDER_LOST_EXIT, words, within_s=_WRITING_S)
