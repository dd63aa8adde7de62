"""The lease book's figures: who is silent, what is leased; and fallbacks, of which each process keeps its own count."""

import os

import pytest

from weightcached.daemon import leases
from weightcached.daemon.leases import FallbackCount, LeaseBook
from weightcached.protocol.peers import Peer

PEER = Peer(pid=os.getpid(), uid=0, gid=0)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("weightcached.daemon.leases.time.monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_an_engine_is_detached_when_it_has_been_silent_for_long(clock: Clock) -> None:
    book = LeaseBook()
    assert (book.detached(), book.silence_s(), book.generations()) == (0, 0.0, set())
    with (
        book.held(peer=PEER, claimed_pid=1, name="a", generation="a" * 32) as lease,
        book.held(peer=PEER, claimed_pid=2, name="b", generation="b" * 32),
    ):
        assert book.generations() == {"a" * 32, "b" * 32}
        clock.now_s += leases.DETACHED_AFTER_S
        assert book.detached() == 0
        clock.now_s += 0.5
        assert (book.detached(), book.silence_s()) == (2, leases.DETACHED_AFTER_S + 0.5)
        lease.heard()
        assert book.detached() == 1
        assert [info.silent_s for info in book.infos()] == [0.0, 15.5]
    assert (len(book), book.detached()) == (0, 0)


def test_a_process_counts_its_fallbacks_itself() -> None:
    count = FallbackCount()
    for pid, said in ((1, 2), (1, 2), (1, 3), (2, 1), (1, 3)):
        count.hear(Peer(pid=pid, uid=0, gid=0), "engine", said)
    assert count.total == 4
    count.hear(Peer(pid=1, uid=0, gid=0), "engine", 1)  # another process, with the pid of one that is gone
    assert count.total == 5
