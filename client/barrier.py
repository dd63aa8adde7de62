"""A barrier between those who compute with weights and whoever exchanges them.

Owns :class:`Barrier`: threads say when they compute (:meth:`Barrier.reading`), and one that stops them gets a
:class:`Stopped`, which is what an exchange demands. Knows nothing of weights. A forked child has its parent's barrier
with nobody inside; one that another thread forks while the readers are stopped may have half an exchange, and is let
in nowhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightcached.client import forks
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import BarrierError, ReadersInside, WeightCacheError

_NAMES_SHOWN = 8


class Barrier:
    """Readers are inside, or one thread has stopped all of them. Safe to use from any thread.

    Every use of the weights lies in a block of :meth:`reading`: a step, a request, a forward pass. Blocks of one thread
    may lie within each other. Who asks to stop them is next: new readers wait for it, those inside finish.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, _Reader] = {}
        self._stopped: Stopped | None = None
        self._closed: WeightCacheError | None = None
        forks.in_child(self, Barrier._begin_anew_in_child)

    @contextmanager
    def reading(self, who: str | None = None) -> Iterator[None]:
        """In this block the weights stay what they are. Blocks while they are being exchanged. ``who`` is named where
        an exchange could not wait for the end of the block; else it is the thread's name.

        The thread that has stopped all others may read too, but exchanges nothing meanwhile. Raises what went wrong
        where nobody may any more.
        """
        me = threading.get_ident()
        with self._changed:
            reader = self._inside.get(me)
            if reader is None:
                self._changed.wait_for(lambda: self._stopped is None or self._stopped.thread == me)
                if self._closed is not None:
                    raise self._closed
                reader = self._inside[me] = _Reader(who or threading.current_thread().name)
            reader.depth += 1
        try:
            yield
        finally:
            with self._changed:
                reader.depth -= 1
                if not reader.depth and self._inside.get(me) is reader:
                    del self._inside[me]
                    self._changed.notify_all()

    @contextmanager
    def stopped(self, *, timeout_s: float = 30.0) -> Iterator[Stopped]:
        """In this block nobody else is inside. New readers wait from now on; those inside are waited for.

        Raises ReadersInside, naming them, where that takes longer than ``timeout_s``; new readers then go on.
        BarrierError in a thread that is itself inside, which would wait for itself.
        """
        stopped = Stopped(self)
        deadline = Deadline.after(timeout_s)
        with self._changed:
            self._require_outside(stopped.thread)
            if not self._changed.wait_for(lambda: self._stopped is None, deadline.remaining_s()):
                raise self._inside_still("another thread that has stopped the readers", timeout_s)
            if self._closed is not None:
                raise self._closed
            self._stopped = stopped
            try:
                if not self._changed.wait_for(lambda: not self._inside, deadline.remaining_s()):
                    raise self._inside_still(self.inside(), timeout_s)
                stopped.begin()
            except BaseException:
                self._go_on()
                raise
        try:
            yield stopped
        finally:
            with self._changed:
                self._go_on()
            stopped.end()

    def close(self, reason: WeightCacheError) -> None:
        """From now on ``reason`` is raised to whoever would come in: what lies behind is not to be read any more."""
        with self._changed:
            self._closed = reason

    def holds(self, stopped: Stopped) -> bool:
        """Whether ``stopped`` is the one who has stopped the readers now, this is its thread, and nobody is inside."""
        return self._stopped is stopped and stopped.thread == threading.get_ident() and not self._inside

    def inside(self) -> str:
        """Who reads now, for people."""
        names = [reader.who for reader in self._inside.values()]
        more = f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return ", ".join(names[:_NAMES_SHOWN]) + more

    def _require_outside(self, me: int) -> None:
        if me in self._inside or (self._stopped is not None and self._stopped.thread == me):
            raise BarrierError(
                "this thread would wait for itself",
                expected="a thread that is not inside the barrier",
                found=self._inside[me].who if me in self._inside else "the thread that has stopped the readers",
                next_step="leave the block of reading() first: exchange weights between steps",
            )

    def _go_on(self) -> None:
        self._stopped = None
        self._changed.notify_all()

    def _inside_still(self, who: str, timeout_s: float) -> ReadersInside:
        return ReadersInside(
            f"readers were still inside the barrier after {timeout_s:g} s; nothing was exchanged",
            expected="nobody inside",
            found=who,
            next_step="allow more time, or let a step be shorter",
        )

    def _begin_anew_in_child(self) -> None:
        """No thread of the parent's runs in a forked child, and none of its locks is safe. Whoever had stopped the
        readers does not go on here: what it was exchanging stays as it was at the fork, for ever.
        """
        self._changed = threading.Condition()
        me = threading.get_ident()
        self._inside = {thread: reader for thread, reader in self._inside.items() if thread == me}
        stopped = self._stopped
        if stopped is None or stopped.thread == me:
            return
        self._stopped = None
        if stopped.begun and self._closed is None:
            self._closed = BarrierError(
                "this process was forked while weights were being exchanged: its copy may be half of each generation",
                expected="a fork while readers are not stopped",
                found="one by another thread than the one that had stopped them",
                next_step="end this process; fork inside a block of reading(), or before weights are exchanged",
            )


class Stopped:
    """The right to exchange weights: of the thread that entered :meth:`Barrier.stopped`, while its block lasts."""

    def __init__(self, barrier: Barrier) -> None:
        self.barrier = barrier
        self.thread = threading.get_ident()
        self.waited_s = 0.0
        """How long it took until nobody was inside."""
        self.seconds: float | None = None
        """How long nobody was inside: None before the end of the block."""
        self.begun = False
        """Whether nobody is inside any more, and weights may be being exchanged."""
        self._afterwards: list[Callable[[], object]] = []
        self._asked_s = time.perf_counter()

    def begin(self) -> None:
        self._began_s = time.perf_counter()
        self.waited_s = self._began_s - self._asked_s
        self.begun = True

    def end(self) -> None:
        """Calls all that was left for afterwards, then raises the first error of theirs, with notes of the others."""
        self.seconds = time.perf_counter() - self._began_s
        first: BaseException | None = None
        for call in self._afterwards:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - raised below: what others have to give back does not wait
                if first is None:
                    first = error
                else:
                    first.add_note(f"and then: {error!r}")
        if first is not None:
            raise first

    def require(self, barrier: Barrier, what: str) -> None:
        """Raises BarrierError, unless this has stopped the readers of ``barrier`` now, and is asked by its thread."""
        if self.barrier is barrier and barrier.holds(self):
            return
        if self.barrier is not barrier:
            found = "a block of another barrier"
        elif self.thread != threading.get_ident():
            found = "another thread than the one that entered the block"
        elif self.begun and self.seconds is None:
            found = f"a block of reading() within it: {barrier.inside()}"
        else:
            found = "a block that is over"
        raise BarrierError(
            f"{what} while somebody may compute with them: nothing was exchanged",
            expected="inside a block of stopped() of the barrier that the weights' readers use",
            found=found,
            next_step="with weights.barrier.stopped() as stopped: staged.swap(stopped)",
        )

    def for_ever(self, reason: WeightCacheError) -> None:
        """The readers do not go on: ``reason`` is raised to them."""
        self.barrier.close(reason)

    def afterwards(self, call: Callable[[], object]) -> None:
        """Have ``call()`` called by this thread when the readers go on."""
        self._afterwards.append(call)


class _Reader:
    def __init__(self, who: str) -> None:
        self.who = who
        self.depth = 0
