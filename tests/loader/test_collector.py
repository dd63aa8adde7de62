"""The pause of the garbage collector: what is made inside is not looked at when it ends, and nothing else changes."""

import gc
from collections.abc import Iterator

import pytest

from weightcached.loader.collector import collector_paused


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    gc.unfreeze()  # what other tests have frozen would stay so, and nothing be made old
    gc.collect()
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_what_is_made_inside_is_old_afterwards() -> None:
    with collector_paused():
        collections = [generation["collections"] for generation in gc.get_stats()[1:]]
        made = [[number] for number in range(100_000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert [generation["collections"] for generation in gc.get_stats()[1:]] == collections
    assert any(one is made for one in gc.get_objects(generation=2))


def test_a_collector_that_is_off_stays_off_and_what_is_frozen_stays_frozen() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()
    gc.enable()
    frozen: list[list[int]] = [[]]
    gc.freeze()
    with collector_paused():
        pass
    assert not any(one is frozen for one in gc.get_objects())  # which are those that are looked at
    assert gc.isenabled()


def test_cycles_from_inside_are_found_later() -> None:
    class Node:
        alive = 0

        def __init__(self) -> None:
            Node.alive += 1
            self.self = self

        def __del__(self) -> None:
            Node.alive -= 1

    with collector_paused():
        Node()
    assert Node.alive == 1
    gc.collect()
    assert Node.alive == 0
