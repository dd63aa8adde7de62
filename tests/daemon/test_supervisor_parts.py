"""Parts of the supervisor that need no process: how long it waits, and what it takes for the same descriptor."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.support.kept_child import sealed
from tests.support.resources import nothing_left_behind
from weightcached.daemon.supervisor.backoff import BackOff
from weightcached.daemon.supervisor.store import Outcome, Store
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.host import export


def test_pauses_double_up_to_the_longest_and_start_anew_after_a_long_life() -> None:
    backoff = BackOff(max_s=10.0, reset_s=60.0)
    pauses_s = [backoff.pause_after(1.0) for _ in range(10)]
    assert pauses_s == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.pause_after(59.9) == 10.0
    assert [backoff.pause_after(60.0), backoff.pause_after(0.0), backoff.pause_after(0.0)] == [0.0, 0.1, 0.2]


def test_no_pause_at_all() -> None:
    backoff = BackOff(max_s=0.0, reset_s=60.0)
    assert [backoff.pause_after(0.0) for _ in range(5)] == [0.0] * 5


@contextmanager
def store_of(limit: int) -> Iterator[Store]:
    with nothing_left_behind(), closing(Store(limit=limit)) as store:
        yield store


def add(store: Store, name: str, fd: int) -> Outcome:
    """Offer a descriptor; what is not kept is closed."""
    with OwnedFds([fd]) as offered:
        return store.add(name, offered, 0)


def test_the_same_file_opened_the_same_way_is_kept_once() -> None:
    with store_of(10) as store:
        memory = sealed("text")
        assert add(store, "a", os.dup(memory)) is Outcome.KEPT
        assert add(store, "b", os.dup(memory)) is Outcome.ALREADY_KEPT
        assert add(store, "readonly", export(memory)) is Outcome.KEPT, "it cannot do what the other can"
        assert add(store, "other", sealed("text")) is Outcome.KEPT
        os.close(memory)
        assert store.names == ("a", "readonly", "other")


def test_both_ends_of_a_pipe_and_of_a_pair_are_two() -> None:
    with store_of(10) as store:
        for fd in (*os.pipe(), *(end.detach() for end in socket.socketpair())):
            assert add(store, "end", fd) is Outcome.KEPT


@pytest.mark.parametrize("make", [lambda: os.open(os.devnull, os.O_RDONLY), lambda: os.eventfd(0)])
def test_devices_and_anonymous_inodes_are_never_taken_for_one_another(make) -> None:
    with store_of(10) as store:
        assert [add(store, "x", make()) for _ in range(3)] == [Outcome.KEPT] * 3


def test_what_is_kept_already_is_no_reason_to_be_full() -> None:
    with store_of(1) as store:
        memory = sealed("text")
        assert add(store, "a", os.dup(memory)) is Outcome.KEPT
        assert add(store, "a", memory) is Outcome.ALREADY_KEPT
        assert add(store, "b", sealed("more")) is Outcome.FULL
        assert store.remove("a") == 1
        assert add(store, "b", sealed("more")) is Outcome.KEPT
