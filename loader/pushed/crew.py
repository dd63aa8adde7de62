"""The threads that deliver what was pushed: each with a port of its own into the destination. Owns their end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType

from weightcached.loader.pushed.receiving import Deliverer, Receiving
from weightcached.loader.slabs import SLAB_NBYTES
from weightcached.protocol.errors import InsufficientMemory

Task = Callable[[Deliverer], None]


class Crew:
    """A context manager. ``on_failure`` is called once, by the thread that failed first; nothing is done after that."""

    def __init__(self, receiving: Receiving, threads: int, on_failure: Callable[[], None]) -> None:
        self._receiving = receiving
        self._on_failure = on_failure
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, name=f"weightcached-push-{n}") for n in range(threads)]
        self._started: list[threading.Thread] = []
        self.failure: BaseException | None = None

    def give(self, task: Task) -> None:
        """Somebody does it, soon."""
        self._tasks.put(task)

    def settle(self) -> None:
        """Wait until all that was given is done. Raises the first failure."""
        self._tasks.join()
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        try:
            with self._receiving.destination.port(SLAB_NBYTES) as port:
                deliverer = self._receiving.deliverer(port)
                while self._next(deliverer):
                    pass
        except BaseException as failure:  # noqa: BLE001 - raised again by `settle`, in the thread that waits for us
            self._fail(failure)
            while self._next(None):
                pass

    def _next(self, deliverer: Deliverer | None) -> bool:
        """Do the next task, or, without a deliverer, leave it undone; whether there are more to come."""
        task = self._tasks.get()
        try:
            if task is not None and deliverer is not None and self.failure is None:
                task(deliverer)
        finally:
            self._tasks.task_done()
        return task is not None

    def _fail(self, failure: BaseException) -> None:
        with self._lock:
            first = self.failure is None
            if first:
                self.failure = failure
        if first:
            self._receiving.destination.abandon()
            self._on_failure()

    def __enter__(self) -> Crew:
        try:
            for thread in self._threads:
                thread.start()
                self._started.append(thread)
        except RuntimeError as error:  # what Python says when the system gives it no thread
            self._end()
            raise InsufficientMemory("cannot start a thread to take what is pushed", found=error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
        self._end()

    def _end(self) -> None:
        for _ in self._started:
            self._tasks.put(None)
        for thread in self._started:
            thread.join()
