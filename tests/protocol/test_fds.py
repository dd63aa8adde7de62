"""Descriptors with an owner: each is closed once, by whoever answers for it, however the owner ends."""

import os

import pytest

from tests.support.resources import open_fds
from weightcached.protocol.fds import OwnedFds


def test_what_was_taken_stays_open_and_the_rest_is_closed_once() -> None:
    """A second close must not reach a descriptor that has the same number by then."""
    before = open_fds()
    with OwnedFds([os.memfd_create("a"), os.memfd_create("b")]) as owned:
        taken = owned.take(0)
        number = owned[1]
    with OwnedFds([os.memfd_create("c")]) as later:
        assert later[0] == number
        owned.close()
        assert os.fstat(later[0])
    os.close(taken)
    assert open_fds() == before


def test_an_owner_that_is_dropped_closes_what_it_owns() -> None:
    """A signal's exception may come between a frame's arrival and the ``with`` that would have closed it."""
    before = open_fds()

    def interrupted() -> None:
        OwnedFds([os.memfd_create("a")]).extend([os.memfd_create("b")])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert open_fds() == before
