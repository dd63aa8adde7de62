"""Helper processes: how they are started with this interpreter, what they do to themselves at their start, their age.

Called by the processes of weightcached (keeper, worker, digest process) on themselves; never by an engine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_LAST_OF_ALL = 3 << 13
"""The idle class: only while nobody else reads."""
_IOPRIO_LAST_OF_MANY = 2 << 13 | 7
"""The lowest level of the usual class: behind others, and never not at all."""

_libc = ctypes.CDLL(None, use_errno=True)


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module`` with this interpreter. ``-P``: no file of the current directory (a model's, say)
    can stand in for a module.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent(expected_parent_pid: int) -> None:
    """From now on the kernel kills this process (SIGKILL) when the *thread* that started it ends.

    The parent passes its own pid: if it died before this call the request came too late, and the process kills itself
    here. Limits: the kernel forgets the request on a change of credentials, and children of this process do not inherit
    it. Raises :class:`OSError` when the kernel refuses.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != expected_parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def age_s() -> float:
    """For how long this process has been running, to a hundredth of a second."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        after_name = file.read().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


STEP_BACK_NICENESS = 15
"""Of a process that somebody waits for: about a thirtieth of a core where another process wants all of it."""


def step_back() -> tuple[str, ...]:
    """Gives CPU and disk to everybody else first, and still gets on where they are busy: for work that somebody waits
    for, beside an engine. As :func:`lower_priority` otherwise.
    """
    return _lower(STEP_BACK_NICENESS, _IOPRIO_LAST_OF_MANY)


def lower_priority() -> tuple[str, ...]:
    """Gives CPU (nice 19) and disk (the idle class) to everybody else first; call it before any thread is started.

    Returns what could not be lowered, in words: that is worth a log line, not a failure.
    """
    return _lower(19, _IOPRIO_LAST_OF_ALL)


def _lower(niceness: int, disk: int) -> tuple[str, ...]:
    refused = []
    try:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    except OSError as error:
        refused.append(f"CPU priority: {error.strerror}")
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        refused.append(f"disk priority: unknown machine {platform.machine()}")
    elif _libc.syscall(number, _IOPRIO_WHO_PROCESS, 0, disk) != 0:
        refused.append(f"disk priority: {os.strerror(ctypes.get_errno())}")
    return tuple(refused)
