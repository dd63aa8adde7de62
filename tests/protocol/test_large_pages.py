"""Large pages of a segment: made for real where this kernel can, never a byte changed, and given up where it cannot.

What the kernel says of its pages (`/proc/self/smaps`) decides whether they are large, not our own count.
"""

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.resources import nothing_left_behind
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host, large_pages
from weightcached.protocol.memory.large_pages import STRETCH_NBYTES, LargePages

LARGE = host.LARGE_PAGE_NBYTES
NBYTES = STRETCH_NBYTES + 3 * LARGE + 5 * mmap.PAGESIZE
WHOLE_PAGES_NBYTES = NBYTES // LARGE * LARGE


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture
def segment() -> Iterator[int]:
    with OwnedFds([host.allocate(NBYTES, name="large")]) as fds:
        yield fds[0]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow a busy machine is, stretches are not given up for being slow."""
    monkeypatch.setattr(large_pages, "SLOW_STRETCH_S", 60.0)


def random_bytes(nbytes: int) -> bytes:
    return os.urandom(1 << 20) * (nbytes >> 20) + os.urandom(nbytes & 0xFFFFF)


def make_all(segment: int) -> LargePages:
    with LargePages(segment, nbytes=NBYTES) as pages:
        pages.prepare(0, NBYTES)
    return pages


def require_kernel(pages: LargePages) -> None:
    if pages.gave_up is not None:
        pytest.skip(f"this kernel makes no large pages here: {pages}")


def mapped_large_nbytes(mapping: host.Mapping) -> int:
    """How much of the mapping the kernel maps as large pages of shared memory, after every page was read."""
    sum(mapping.view()[:: mmap.PAGESIZE])
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    start = f"{mapping.address:x}-"
    next(line for line in lines if line.startswith(start))
    line = next(line for line in lines if line.startswith("ShmemPmdMapped:"))
    return int(line.split()[1]) * 1024


@pytest.mark.usefixtures("patient")
def test_an_engine_maps_a_filled_and_sealed_segment_by_large_pages(segment: int) -> None:
    pages = make_all(segment)
    require_kernel(pages)
    data = random_bytes(NBYTES)
    os.pwrite(segment, data, 0)
    host.seal(segment)
    mapping = host.map_private(segment, nbytes=NBYTES)
    try:
        assert mapped_large_nbytes(mapping) == WHOLE_PAGES_NBYTES == pages.made_nbytes
        assert bytes(mapping.view()) == data
        mapping.view()[LARGE + 1] ^= 0xFF  # a private copy of one small page, whatever lies below
        assert os.pread(segment, NBYTES, 0) == data
    finally:
        mapping.close()


@pytest.mark.usefixtures("patient")
def test_what_was_written_before_stays(segment: int) -> None:
    data = random_bytes(NBYTES)
    os.pwrite(segment, data, 0)
    make_all(segment)
    assert os.pread(segment, NBYTES, 0) == data


@pytest.mark.usefixtures("patient")
def test_writers_that_overtake_lose_nothing(segment: int) -> None:
    data = random_bytes(NBYTES)
    position = iter(range(0, NBYTES, 1 << 16))

    def write(pages: LargePages) -> None:
        for offset in position:
            pages.prepare(offset, NBYTES)  # of all that follows, too: writing and making meet in the same stretches
            os.pwrite(segment, data[offset : offset + (1 << 16)], offset)

    with LargePages(segment, nbytes=NBYTES) as pages:
        writers = [threading.Thread(target=write, args=(pages,)) for _ in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    assert os.pread(segment, NBYTES, 0) == data


@pytest.mark.usefixtures("patient")
def test_only_what_was_asked_for_is_made() -> None:
    nbytes = 4 * STRETCH_NBYTES
    with OwnedFds([host.allocate(nbytes, name="some")]) as fds, LargePages(fds[0], nbytes=nbytes) as pages:
        pages.prepare(STRETCH_NBYTES + 1, 2 * STRETCH_NBYTES)
        require_kernel(pages)
        assert os.fstat(fds[0]).st_blocks * 512 == pages.made_nbytes == STRETCH_NBYTES
        pages.prepare(2 * STRETCH_NBYTES - 1, 2 * STRETCH_NBYTES + 1)
        assert pages.made_nbytes == 2 * STRETCH_NBYTES


@pytest.mark.usefixtures("patient")
def test_whoever_prepares_what_others_are_making_finds_it_made() -> None:
    nbytes = 8 * STRETCH_NBYTES
    with OwnedFds([host.allocate(nbytes, name="together")]) as fds, LargePages(fds[0], nbytes=nbytes) as pages:
        found = []

        def prepare() -> None:
            pages.prepare(0, nbytes)
            found.append(pages.gave_up is not None or pages.memory(0, nbytes) is not None)

        threads = [threading.Thread(target=prepare) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        require_kernel(pages)
    assert found == [True] * 6


@pytest.mark.usefixtures("patient")
def test_memory_is_lent_where_all_of_it_is_in_large_pages(segment: int) -> None:
    data = random_bytes(WHOLE_PAGES_NBYTES)
    with LargePages(segment, nbytes=NBYTES) as pages:
        assert pages.memory(0, 1) is None
        pages.prepare(0, STRETCH_NBYTES)
        require_kernel(pages)
        assert pages.memory(0, STRETCH_NBYTES) is not None
        assert pages.memory(STRETCH_NBYTES - 1, 2) is None
        pages.prepare(0, NBYTES)
        assert pages.memory(WHOLE_PAGES_NBYTES, 1) is None
        assert pages.memory(WHOLE_PAGES_NBYTES - 1, 2) is None
        before = os.fstat(segment).st_blocks
        for offset in range(0, WHOLE_PAGES_NBYTES, LARGE):
            lent = pages.memory(offset, LARGE)
            assert lent is not None
            lent[:] = data[offset : offset + LARGE]
        assert os.fstat(segment).st_blocks == before
        del lent
    assert pages.memory(0, 1) is None
    host.seal(segment)
    assert os.pread(segment, WHOLE_PAGES_NBYTES, 0) == data


def test_a_file_is_left_as_it_is(tmp_path: Path) -> None:
    """Disk files have no such pages: after three refusals nothing more is tried."""
    path = tmp_path / "file"
    data = random_bytes(6 * STRETCH_NBYTES)
    path.write_bytes(data)
    with OwnedFds([os.open(path, os.O_RDWR | os.O_CLOEXEC)]) as fds, LargePages(fds[0], nbytes=len(data)) as pages:
        pages.prepare(0, len(data))
        assert pages.gave_up is not None
        assert pages.made_nbytes == 0
    assert path.read_bytes() == data


def test_when_pages_come_slowly_the_rest_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "SLOW_STRETCH_S", 0.0)
    nbytes = 6 * STRETCH_NBYTES
    with OwnedFds([host.allocate(nbytes, name="slow")]) as fds, LargePages(fds[0], nbytes=nbytes) as pages:
        pages.prepare(0, nbytes)
        assert pages.gave_up is not None
        assert os.fstat(fds[0]).st_blocks * 512 <= 3 * STRETCH_NBYTES
        assert str(pages) == f"{pages.made_nbytes >> 20} of {nbytes >> 20} MiB: {pages.gave_up}"


def test_the_segment_never_grows() -> None:
    with OwnedFds([host.allocate(3 * mmap.PAGESIZE, name="small")]) as fds:
        with LargePages(fds[0], nbytes=10 * LARGE) as pages:  # more than there is
            pages.prepare(0, 1)
        assert os.fstat(fds[0]).st_size == 3 * mmap.PAGESIZE
        assert str(pages) == "0 of 0 MiB: the segment is smaller than one"
