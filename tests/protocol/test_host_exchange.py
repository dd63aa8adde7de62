"""Exchanging what two mappings of host memory show: addresses and views stay, private pages go along, page tables move
whole; what the kernel refuses leaves what was there.
"""

import mmap
import os
import resource
import time
from collections.abc import Iterator

import pytest

from tests.support.denied import MREMAP, Denied, deny
from tests.support.forked import in_child
from tests.support.resources import memfd_mappings, nothing_left_behind
from weightcached.protocol.errors import SwapFailed, SwapRefused
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host

SIZES = [1, mmap.PAGESIZE + 1, 3 * host.LARGE_PAGE_NBYTES + 5 * mmap.PAGESIZE + 7]
FIXED, KEEPING = 3, 7
"""Flags of mremap: of the second move and the way back, of the first."""


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield


def generation(word: bytes, nbytes: int) -> host.Mapping:
    """A mapping of a sealed segment that begins and ends with ``word``."""
    with OwnedFds([host.allocate(nbytes, name="generation")]) as fds:
        if nbytes:
            os.pwrite(fds[0], word[:nbytes], 0)
            os.pwrite(fds[0], word[-1:], nbytes - 1)
        host.seal(fds[0])
        return host.map_private(fds[0], nbytes=nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
def test_an_exchange_shows_other_bytes_at_the_same_address_and_again_is_the_way_back(nbytes: int) -> None:
    used, other = generation(b"1", nbytes), generation(b"2", nbytes)
    address, view = used.address, used.view()
    maps = len(memfd_mappings())
    for expected in (b"2", b"1", b"2", b"1"):
        used.exchange(other)
        assert used.address == address
        assert bytes(view[:1]) + bytes(view[-1:]) == expected * 2
        there = other.view()
        assert bytes(there[:1]) != expected
        del there
        assert len(memfd_mappings()) == maps
    assert other.address % mmap.PAGESIZE == 0
    if nbytes >= host.LARGE_PAGE_NBYTES:
        assert other.address % host.LARGE_PAGE_NBYTES == 0
    other.close()
    assert bytes(view[-1:]) == b"1"
    del view
    used.close()


def test_an_empty_segment_is_exchanged_too() -> None:
    used, other = generation(b"", 0), generation(b"", 0)
    used.exchange(other)
    used.close()
    other.close()


def test_private_pages_go_along_and_come_back() -> None:
    used, other = generation(b"1", SIZES[-1]), generation(b"2", SIZES[-1])
    view = used.view()
    view[5] = 99
    used.exchange(other)
    assert view[5] == 0
    used.exchange(other)
    assert view[5] == 99
    used.revert()
    assert view[5] == 0
    del view
    used.close()
    other.close()


def test_pages_that_were_entered_stay_entered() -> None:
    nbytes = 64 * host.LARGE_PAGE_NBYTES
    used, other = generation(b"1", nbytes), generation(b"2", nbytes)
    view = used.view()
    used.populate()
    other.populate()
    used.exchange(other)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert sum(view[:: mmap.PAGESIZE]) == ord("2")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < nbytes // mmap.PAGESIZE // 100
    del view
    used.close()
    other.close()


def test_the_time_of_an_exchange_does_not_grow_with_the_pages_that_were_touched() -> None:
    nbytes = 128 * host.LARGE_PAGE_NBYTES
    used, other = generation(b"1", nbytes), generation(b"2", nbytes)
    used.populate()
    other.populate()
    seconds = []
    for _ in range(5):
        began_s = time.perf_counter()
        used.exchange(other)
        seconds.append(time.perf_counter() - began_s)
    assert min(seconds) < 0.005  # page by page it would be ten times that
    used.close()
    other.close()


def test_another_size_or_a_closed_mapping_is_not_exchanged() -> None:
    used, other = generation(b"1", 4096), generation(b"2", 4097)
    with pytest.raises(SwapRefused, match=r"4096 bytes.*4097 bytes"):
        used.exchange(other)
    other.close()
    with pytest.raises(ValueError, match="closed"):
        used.exchange(other)
    used.close()


def test_without_addresses_for_what_is_moved_nothing_is() -> None:
    def starve() -> None:
        nbytes = 32 * host.LARGE_PAGE_NBYTES
        used, other = generation(b"1", nbytes), generation(b"2", nbytes)
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (taken + nbytes // 2, resource.RLIM_INFINITY))
        with pytest.raises(SwapFailed, match="no addresses"):
            used.exchange(other)
        assert (used.view()[0], other.view()[0]) == (ord("1"), ord("2"))

    in_child(starve)


@pytest.mark.skipif(MREMAP is None, reason="the number of mremap on this machine is not known to the tests")
@pytest.mark.parametrize("refused", ["the first move", "the second move"])
def test_a_move_that_the_kernel_refuses_leaves_both_as_they_were(refused: str) -> None:
    def moves() -> None:
        nbytes = SIZES[-1]
        used, other = generation(b"1", nbytes), generation(b"2", nbytes)
        used.view()[5] = 99
        maps = len(memfd_mappings())
        assert MREMAP is not None
        deny(Denied(MREMAP, 3, KEEPING) if refused == "the first move" else Denied(MREMAP, 0, other.address))
        with pytest.raises(SwapFailed, match="the weights in use are what they were"):
            used.exchange(other)
        assert (used.view()[0], used.view()[5], other.view()[0]) == (ord("1"), 99, ord("2"))
        assert len(memfd_mappings()) == maps

    in_child(moves)


@pytest.mark.skipif(MREMAP is None, reason="the number of mremap on this machine is not known to the tests")
def test_where_neither_can_be_moved_in_the_error_says_that_nothing_is_valid() -> None:
    def moves() -> None:
        used, other = generation(b"1", SIZES[-1]), generation(b"2", SIZES[-1])
        assert MREMAP is not None
        deny(Denied(MREMAP, 3, FIXED))
        with pytest.raises(SwapFailed, match=f"{used.address:#x}.*not valid any more: end this process"):
            used.exchange(other)

    in_child(moves)
