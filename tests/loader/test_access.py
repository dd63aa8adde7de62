"""The ways in which a file's bytes come into buffers: the same bytes by each, and what each is there for."""

import errno
import gc
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.distant_files import far_away
from tests.support.execution import resident, segment_of
from tests.support.resources import open_fds
from weightcached.loader import pipeline
from weightcached.loader.access import DIRECT_NBYTES, Buffered, Direct, Mapped, look
from weightcached.loader.boxes import Box, whole
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.execute import execute
from weightcached.loader.planned import Copy, PlannedParameter, TensorHeader
from weightcached.loader.reading import ALONE_NBYTES, Extent, Reader
from weightcached.loader.slabs import slabs
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import DeploymentError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.worker_messages import LoadStrategy

WAYS = (Buffered, Direct, Mapped, partial(Buffered, apart=True))
VALUES = np.random.default_rng(7).integers(0, 256, 2 * DIRECT_NBYTES + 12345, np.uint8).tobytes()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, int]]:
    path = tmp_path / "file"
    path.write_bytes(VALUES)
    fd = os.open(path, os.O_RDONLY)
    yield {"file": fd}
    os.close(fd)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, DIRECT_NBYTES - 7])
@pytest.mark.parametrize("sizes", [(1,), (3, 4096, 5), (DIRECT_NBYTES + 4097,), (100, DIRECT_NBYTES, 9)])
def test_buffers_are_filled_one_after_the_other(
    way: Callable[..., Any], offset: int, sizes: tuple[int, ...], files: dict[str, int]
) -> None:
    buffers = [memoryview(bytearray(size)) for size in sizes]
    way(files).fill("file", buffers, offset)
    assert b"".join(buffers) == VALUES[offset : offset + sum(sizes)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("there", [0, 1, 5000])
def test_the_end_of_the_file_is_told_with_what_was_there(
    way: Callable[..., Any], there: int, files: dict[str, int]
) -> None:
    with pytest.raises(EOFError) as caught:
        way(files).fill("file", [memoryview(bytearray(there + 1))], len(VALUES) - there)
    assert caught.value.args == (there,)


def test_what_is_read_past_the_page_cache_is_not_in_it(files: dict[str, int]) -> None:
    os.fsync(files["file"])
    os.posix_fadvise(files["file"], 0, 0, os.POSIX_FADV_DONTNEED)
    if look(files)["file"].cached_share or not look(files)["file"].direct:
        pytest.skip("this file system does not let go of pages, or cannot be read past them")
    direct = Direct(files)
    direct.fill("file", [memoryview(bytearray(len(VALUES)))], 0)
    direct.close()
    assert look(files)["file"].cached_share == 0
    Buffered(files).fill("file", [memoryview(bytearray(len(VALUES)))], 0)
    assert look(files)["file"].cached_share == 1


@pytest.mark.parametrize(("columns", "calls"), [(1024, 5), (ALONE_NBYTES, 68)], ids=["with gaps", "alone"])
def test_past_the_page_cache_a_block_is_read_once_and_no_range_further_than_it_goes(
    columns: int, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other stretch of a file, in slabs that end anywhere: short ones out of blocks, long ones by themselves."""
    rows, before = (4 * DIRECT_NBYTES - 8192) // (2 * columns), 1000
    values = np.random.default_rng(1).integers(0, 256, (rows, 2 * columns), np.uint8)
    path = tmp_path / "file"
    path.write_bytes(bytes(before) + values.tobytes())
    box = Box((0, columns), (rows, columns))
    copy = Copy(TensorHeader("t", "uint8", values.shape, "file", before, values.nbytes), box, whole(box.shape))
    run = list(slabs(PlannedParameter("p", box.shape, "uint8", "uint8", (copy,)), slab_nbytes=100_001))
    read: list[int] = []
    preadv = os.preadv

    def counted(*arguments: Any) -> int:
        read.append(preadv(*arguments))
        return read[-1]

    made = bytearray()
    with OwnedFds([os.open(path, os.O_RDONLY | os.O_CLOEXEC)]) as fds:
        reader = Reader(direct := Direct({"file": fds[0]}))
        monkeypatch.setattr(os, "preadv", counted)
        reader.begin(run)
        for slab in run:
            buffer = bytearray(slab.source_nbytes)
            reader.fill(slab, memoryview(buffer))
            made += buffer
        direct.close()
    assert made == values[:, columns:].tobytes()
    assert len(read) <= calls
    assert sum(read) <= (values.nbytes if columns == 1024 else values.nbytes // 2) + 2 * 4096 * len(read)


def test_past_the_page_cache_blocks_are_read_while_the_thread_does_something_else(
    files: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So far ahead as it was told, and no further; with each that it leaves behind, one more."""
    begun, preadv = queue.SimpleQueue[int](), os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        begun.put(offset)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    with closing(Direct(files, ahead_nbytes=DIRECT_NBYTES)) as direct:
        direct.begin(iter([Extent("file", 0, len(VALUES))]))
        assert {begun.get(timeout=20) for _ in range(2)} == {0, DIRECT_NBYTES}
        buffer = bytearray(100)
        direct.fill("file", [memoryview(buffer)], DIRECT_NBYTES)
        assert buffer == VALUES[DIRECT_NBYTES : DIRECT_NBYTES + 100]
        assert begun.get(timeout=20) == 2 * DIRECT_NBYTES
        assert begun.empty()


def test_past_the_page_cache_what_fails_is_told_by_whoever_needs_it(
    files: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is read in vain may fail; and another file than was told of may be read."""
    preadv = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == DIRECT_NBYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with closing(Direct({**files, "other": files["file"]})) as direct:
        direct.begin(iter([Extent("file", 0, len(VALUES))]))
        buffer = bytearray(100)
        direct.fill("file", [memoryview(buffer)], 2 * DIRECT_NBYTES)
        assert buffer == VALUES[2 * DIRECT_NBYTES : 2 * DIRECT_NBYTES + 100]
        direct.begin(iter([Extent("file", 0, len(VALUES))]))
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            direct.fill("file", [memoryview(bytearray(len(VALUES)))], 0)
        direct.fill("other", [memoryview(buffer)], 7)
        assert buffer == VALUES[7:107]


def test_threads_apart_have_a_descriptor_each_for_as_long_as_files_are_read(tmp_path: Path) -> None:
    """Or the kernel would take their reads for those of one that jumps about, and read nothing ahead."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.write_bytes(VALUES)
    with OwnedFds([os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]) as fds:
        gc.collect()  # mappings of tests before hold a descriptor each
        before = open_fds()
        access = Buffered({"one": fds[0], "two": fds[1]}, apart=True)
        barrier = threading.Barrier(3)

        def read() -> None:
            for file in ("one", "two", "one"):
                access.begin(iter([Extent(file, 5, 1000)]))
                buffer = bytearray(1000)
                access.fill(file, [memoryview(buffer)], 5)
                assert buffer == VALUES[5:1005]
            barrier.wait()
            barrier.wait()

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        assert len(open_fds()) == len(before) + 2
        barrier.wait()
        for thread in threads:
            thread.join()
        access.close()
        assert open_fds() == before


def test_only_what_is_cached_is_looked_at_in_a_mapping_and_only_where_that_is_allowed(files: dict[str, int]) -> None:
    Buffered(files).fill("file", [memoryview(bytearray(len(VALUES)))], 0)
    assert Buffered(files).view("file", 0, 10) is None
    access = Buffered(files, mapped=True)
    view = access.view("file", 3, 5000)
    assert view is not None
    assert view == VALUES[3:5003]
    assert access.view("file", len(VALUES) - 1, 2) is None
    os.fsync(files["file"])
    os.posix_fadvise(files["file"], 0, 0, os.POSIX_FADV_DONTNEED)
    if not look(files)["file"].cached_share:
        assert Buffered(files, mapped=True).view("file", 3, 5000) is None


def test_a_file_that_cannot_be_read_past_the_page_cache_is_named() -> None:
    with open("/proc/self/status", "rb") as file, pytest.raises(DeploymentError, match="page cache") as caught:
        Direct({"file": file.fileno()})
    assert caught.value.where == "file"


@pytest.mark.parametrize("strategy", ["read", "prefetch", "direct", "mmap"])
def test_every_strategy_loads_the_same(strategy: LoadStrategy, tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path, hidden_size=256, vocab_size=4096)
    made = []
    ways: tuple[LoadStrategy, ...] = ("auto", strategy)
    for way in ways:
        with open_checkpoint(directory) as checkpoint:
            prepared = pipeline.prepare(checkpoint, build_config(directory, layout="fused", tp_size=2, tp_rank=1))
            with segment_of(prepared.placement.nbytes) as segment:
                executed = execute(prepared.placement, checkpoint.files, segment, strategy=way)
                made.append((executed.digests, resident(segment, prepared.placement)))
    assert made[0] == made[1]


@pytest.mark.root
@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs FUSE")
def test_files_far_away_are_asked_for_many_at_a_time(tmp_path: Path) -> None:
    """Where each answer takes 20 ms, one after the other would take all day."""
    directory = tiny_llama(tmp_path / "here", hidden_size=512, vocab_size=16384)
    with (
        far_away(directory, tmp_path / "there", latency_s=0.02) as served,
        open_checkpoint(tmp_path / "there") as checkpoint,
    ):
        config = build_config(tmp_path / "there", layout="fused", tp_size=1, tp_rank=0)
        prepared = pipeline.prepare(checkpoint, config)
        with segment_of(prepared.placement.nbytes) as segment:
            executed = execute(prepared.placement, checkpoint.files, segment)
    assert served.waiting_max >= 16
    with open_checkpoint(directory) as checkpoint, segment_of(prepared.placement.nbytes) as segment:
        assert execute(prepared.placement, checkpoint.files, segment).digests == executed.digests
