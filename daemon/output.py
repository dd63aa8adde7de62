"""Standard output and standard error that cannot be written, for all commands of ``weightcached`` in one place.

Standard error is for people, and drops what it cannot say: a command goes on without who watched it. Standard output is
what was asked for: the first write that fails is the end, :data:`UNREAD_EXIT` or :data:`UNWRITTEN_EXIT`, which say
nothing of what the command has done; one line on standard error does. Descriptors that were closed before the command
began count as not writable, and nothing else gets their numbers.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from weightcached.protocol.text import one_line

UNREAD_EXIT = 128 + signal.SIGPIPE
"""Nobody reads standard output any more, as after ``| head``: as of a process that SIGPIPE ends."""

UNWRITTEN_EXIT = 74
"""Standard output cannot be written: a full disk, a terminal that is gone, a closed descriptor (EX_IOERR)."""


class OutputLost(BaseException):
    """Standard output cannot be written. No error of the command's own work, so nobody on the way takes it for one."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _Raw(io.FileIO):
    """A descriptor that is not written again once that has failed."""

    def __init__(self, descriptor: int, *, needed: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._needed = needed
        self._lost = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        if not self._lost:
            try:
                return super().write(data)
            except OSError as error:
                self._lost = True
                if self._needed:
                    raise OutputLost(error) from error
        return memoryview(data).nbytes


def status_of(command: str, work: Callable[[], int]) -> int:
    """The status of ``work``, or the one that says that its output is lost."""
    status: object = None
    with _guarded():
        try:
            try:
                return (status := work())
            except SystemExit as ended:
                status = ended.code or 0
                raise
            finally:
                sys.stdout.flush()
        except OutputLost as lost:
            if isinstance(lost.reason, BrokenPipeError):
                return UNREAD_EXIT
            done = "what it had done by then stands" if status is None else f"all else is done, with status {status}"
            why = f"standard output cannot be written: {lost.reason.strerror}; {done}"
            step = "next step: have it write elsewhere, and look how things are before you repeat it"
            print(one_line(f"{command}: {why}; {step}"), file=sys.stderr)
            return UNWRITTEN_EXIT


@contextmanager
def _guarded() -> Iterator[None]:
    """In the block, the process's two streams are as the module says. Streams that somebody put there stay."""
    before = sys.stdout, sys.stderr
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free: this one. A write to it fails; to standard error it is dropped.
            os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(sys.stdout, 1, needed=True)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(sys.stderr, 2, needed=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _stream(stream: TextIO | None, descriptor: int, *, needed: bool) -> TextIO:
    """Like ``stream``, which Python has not made where the descriptor was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Raw(descriptor, needed=needed)),
        encoding=stream.encoding if stream is not None else None,
        errors=stream.errors if stream is not None else "backslashreplace",
        line_buffering=not needed or os.isatty(descriptor),  # else all at the end: what has been done is known by then
    )
