"""Forked children, and theirs: locks that a thread of the parent's has at the fork, and readers that are not there.

Each child is killed after a while, so that one that waits for ever is a failure.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.support.forked import in_child
from weightcached.client import Barrier, WeightSet
from weightcached.protocol.errors import BarrierError


def in_brief_child(work: Callable[[], object]) -> None:
    """As :func:`in_child`; the child ends by SIGALRM where it is not done in 20 s."""

    def bounded() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        work()

    in_child(bounded)


@contextmanager
def held_by_another_thread(lock: threading.Condition) -> Iterator[None]:
    taken, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            assert leave.wait(60)

    with ThreadPoolExecutor() as threads:
        holding = threads.submit(hold)
        try:
            assert taken.wait(20)
            yield
        finally:
            leave.set()
        holding.result(20)


def test_what_was_staged_is_given_up_in_a_child_whose_parent_was_talking_to_the_daemon(swappable: WeightSet) -> None:
    assert swappable.lease is not None
    with swappable.stage() as staged:
        mapped = staged._mapped
        assert mapped is not None

        def child() -> None:
            staged.close()
            assert all(segment.closed for segment in mapped.segments)
            swappable.close()
            assert swappable.state == "closed"

        with held_by_another_thread(swappable.lease._conversation._changed):
            in_brief_child(child)
    assert swappable.lease.ping() < 20


def test_a_child_may_ask_a_follower_whose_parent_was_hearing_of_an_event(swappable: WeightSet) -> None:
    following = swappable.follow()

    def child() -> None:
        following.nudge()
        assert following.wait(20)

    with held_by_another_thread(following._changed):
        in_brief_child(child)


def test_a_child_of_a_child_has_the_barrier_without_the_readers_of_its_parent() -> None:
    barrier = Barrier()

    def grandchild() -> None:
        with barrier.stopped(timeout_s=5) as stopped:
            assert barrier.holds(stopped)

    def child() -> None:
        inside, leave = threading.Event(), threading.Event()

        def read() -> None:
            with barrier.reading("of the child"):
                inside.set()
                assert leave.wait(20)

        with ThreadPoolExecutor() as threads:
            reading = threads.submit(read)
            assert inside.wait(20)
            in_child(grandchild)
            leave.set()
            reading.result(20)

    in_brief_child(child)


def test_a_child_of_a_child_that_was_forked_within_an_exchange_lets_nobody_in() -> None:
    barrier = Barrier()

    def grandchild() -> None:
        with pytest.raises(BarrierError, match="forked while"):
            barrier.reading().__enter__()

    with ThreadPoolExecutor() as threads, barrier.stopped():
        threads.submit(in_brief_child, lambda: in_child(grandchild)).result(60)
