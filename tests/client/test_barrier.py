"""The barrier: who is inside holds up whoever stops, who stops holds up whoever comes, and nobody waits for himself."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.support.forked import in_child
from weightcached.client import Barrier
from weightcached.client.barrier import Stopped
from weightcached.protocol.errors import BarrierError, ReadersInside


def test_readers_inside_are_named_at_the_deadline_and_go_on() -> None:
    barrier, inside, leave = Barrier(), threading.Event(), threading.Event()

    def read() -> None:
        with barrier.reading("step 7"):
            inside.set()
            leave.wait(20)

    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read)
        inside.wait(20)
        with pytest.raises(ReadersInside, match=r"after 0.05 s.*step 7"), barrier.stopped(timeout_s=0.05):
            raise AssertionError("nobody may come here")
        with barrier.reading():  # new readers are let in again
            leave.set()
        reading.result(20)
    with barrier.stopped(timeout_s=0) as stopped:
        assert barrier.holds(stopped)


def test_a_thread_without_a_name_of_its_own_is_named_by_the_thread() -> None:
    barrier, inside, leave = Barrier(), threading.Event(), threading.Event()

    def read() -> None:
        with barrier.reading():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=read, name="prefill")
    thread.start()
    inside.wait(20)
    with pytest.raises(ReadersInside, match="prefill"), barrier.stopped(timeout_s=0):
        pass
    leave.set()
    thread.join()


def test_who_stops_waits_for_those_inside_and_is_next() -> None:
    barrier, inside, leave, order = Barrier(), threading.Event(), threading.Event(), []

    def first() -> None:
        with barrier.reading("first"):
            inside.set()
            leave.wait(20)
            order.append("first")

    def stop() -> None:
        with barrier.stopped() as stopped:
            order.append("stopped")
        assert stopped.waited_s > 0
        assert stopped.seconds is not None

    def late() -> None:
        with barrier.reading("late"):
            order.append("late")

    with ThreadPoolExecutor() as threads:
        reading = threads.submit(first)
        inside.wait(20)
        stopping = threads.submit(stop)
        while barrier._stopped is None:
            pass
        coming = threads.submit(late)
        with pytest.raises(TimeoutError):
            coming.result(0.05)
        leave.set()
        for each in (reading, stopping, coming):
            each.result(20)
    assert order == ["first", "stopped", "late"]


def test_blocks_of_one_thread_lie_within_each_other() -> None:
    barrier = Barrier()
    with barrier.reading():
        with barrier.reading():
            pass
        with pytest.raises(BarrierError, match="wait for itself"), barrier.stopped():
            pass
    with barrier.stopped() as stopped:
        with barrier.reading():
            assert not barrier.holds(stopped)
        assert barrier.holds(stopped)
        with pytest.raises(BarrierError, match="wait for itself"), barrier.stopped():
            pass


def test_the_right_to_exchange_is_of_a_block_its_barrier_and_its_thread() -> None:
    barrier = Barrier()
    with barrier.stopped() as stopped:
        stopped.require(barrier, "x")
        with pytest.raises(BarrierError, match="another barrier"):
            stopped.require(Barrier(), "x")
        with ThreadPoolExecutor() as threads, pytest.raises(BarrierError, match="another thread"):
            threads.submit(stopped.require, barrier, "x").result(20)
    with pytest.raises(BarrierError, match="a block that is over"):
        stopped.require(barrier, "x")
    with pytest.raises(BarrierError, match="a block that is over"):
        Stopped(barrier).require(barrier, "x")


def test_what_is_left_for_afterwards_is_done_when_readers_have_gone_on() -> None:
    barrier, done = Barrier(), []

    def afterwards() -> None:
        with ThreadPoolExecutor() as threads:
            threads.submit(read).result(20)
        done.append("afterwards")

    def read() -> None:
        with barrier.reading():
            done.append("read")

    with suppress(ZeroDivisionError), barrier.stopped() as stopped:
        stopped.afterwards(afterwards)
        _ = 1 / 0
    assert done == ["read", "afterwards"]


def test_all_that_is_left_for_afterwards_is_done_whatever_the_first_raises() -> None:
    barrier, done = Barrier(), []

    def failing() -> None:
        done.append("failing")
        raise OSError("the first")

    def failing_too() -> None:
        done.append("failing too")
        raise ValueError("the second")

    def stop() -> None:
        with barrier.stopped() as stopped:
            for each in (failing, failing_too, lambda: done.append("unmapped")):
                stopped.afterwards(each)

    with pytest.raises(OSError, match="the first") as raised:
        stop()
    assert done == ["failing", "failing too", "unmapped"]
    assert raised.value.__notes__ == ["and then: ValueError('the second')"]
    with barrier.reading():
        pass


def test_a_forked_child_has_the_barrier_without_the_readers_of_its_parent() -> None:
    barrier, inside, leave = Barrier(), threading.Event(), threading.Event()

    def read() -> None:
        with barrier.reading("of the parent"):
            inside.set()
            leave.wait(20)

    def child() -> None:
        with barrier.stopped(timeout_s=5) as stopped:
            assert barrier.holds(stopped)

    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read)
        assert inside.wait(20)
        in_child(child)
        leave.set()
        reading.result(20)


def test_a_child_forked_by_another_thread_while_readers_are_stopped_lets_nobody_in() -> None:
    """What it has of the weights may be half an exchange, which nobody ends there."""
    barrier = Barrier()

    def child() -> None:
        with pytest.raises(BarrierError, match=r"forked while weights were being exchanged.*next step"):
            barrier.reading().__enter__()
        with pytest.raises(BarrierError, match="forked while"):
            barrier.stopped(timeout_s=5).__enter__()

    with ThreadPoolExecutor() as threads:
        with barrier.stopped():
            threads.submit(in_child, child).result(60)
        with barrier.reading():  # the parent's goes on
            pass


def test_a_child_forked_while_readers_are_still_waited_for_has_the_barrier() -> None:
    """Nothing is exchanged yet."""
    barrier = Barrier()

    def child() -> None:
        with barrier.reading("of the child"):
            assert barrier.inside() == "of the child"

    def stop() -> bool:
        with barrier.stopped(timeout_s=60) as stopped:
            return barrier.holds(stopped)

    with ThreadPoolExecutor() as threads:
        with barrier.reading():
            stopping = threads.submit(stop)
            while barrier._stopped is None:
                pass
            threads.submit(in_child, child).result(60)
        assert stopping.result(20)


def test_many_readers_and_those_who_stop_them_never_meet() -> None:
    barrier, inside, met = Barrier(), [0], []
    guard = threading.Lock()

    def read() -> None:
        for _ in range(500):
            with barrier.reading():
                with guard:
                    inside[0] += 1
                with guard:
                    inside[0] -= 1

    def stop() -> None:
        for _ in range(100):
            with barrier.stopped():
                met.append(inside[0])

    with ThreadPoolExecutor() as threads:
        for each in [*(threads.submit(read) for _ in range(4)), *(threads.submit(stop) for _ in range(2))]:
            each.result(60)
    assert met == [0] * 200
