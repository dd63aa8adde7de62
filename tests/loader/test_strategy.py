"""Which way files are read, and why: rules over what is known of files and memory. No file is looked at."""

from dataclasses import replace

import pytest

from weightcached.loader.boxes import Box, whole
from weightcached.loader.planned import Copy, PlannedParameter, TensorHeader
from weightcached.loader.strategy import (
    FAR_AHEAD_NBYTES,
    RUN_NBYTES,
    SLABS_NBYTES,
    THREADS,
    WAITING_RUN_NBYTES,
    WAITING_THREADS,
    FileFacts,
    choose,
)

GIB = 1 << 30
FACTS = FileFacts(GIB, "ext4", cached_share=0.0, direct=True)


def parameter(columns: int = 1 << 15) -> PlannedParameter:
    """Some columns of a tensor of 1 GiB that is all of its file."""
    tensor = TensorHeader("t", "uint8", (1 << 15, 1 << 15), "f", 0, GIB)
    box = Box((0, 0), (1 << 15, columns))
    return PlannedParameter("p", box.shape, "uint8", "uint8", (Copy(tensor, box, whole(box.shape)),))


def chosen(facts: FileFacts, *, free_gib: float, columns: int = 1 << 15) -> str:
    return choose([parameter(columns)], {"f": facts}, free_nbytes=int(free_gib * GIB)).name


@pytest.mark.parametrize(
    ("facts", "free_gib", "columns", "wanted"),
    [
        (FACTS, 3.0, 1 << 15, "read"),
        (FACTS, 1.5, 1 << 15, "direct"),
        (replace(FACTS, cached_share=0.9), 1.5, 1 << 15, "read"),
        (replace(FACTS, direct=False), 1.5, 1 << 15, "read"),
        (FACTS, 1.05, 1 << 10, "read"),  # columns: each rank reads all of the file
        (replace(FACTS, file_system="nfs"), 3.0, 1 << 15, "prefetch"),
        (replace(FACTS, file_system="nfs"), 1.5, 1 << 15, "prefetch"),
        (replace(FACTS, file_system="nfs", cached_share=0.9), 3.0, 1 << 15, "read"),
    ],
)
def test_auto(facts: FileFacts, free_gib: float, columns: int, wanted: str) -> None:
    assert chosen(facts, free_gib=free_gib, columns=columns) == wanted


def test_the_reason_says_what_it_was_decided_from() -> None:
    reason = choose([parameter()], {"f": FACTS}, free_nbytes=3 * GIB).reason
    for words in ("read: ", "1.00 GiB of 1.00 GiB on ext4", "0% in the page cache", "3.00 GiB of memory free"):
        assert words in reason


def test_what_is_asked_for_is_taken() -> None:
    strategy = choose([parameter()], {"f": replace(FACTS, cached_share=1.0)}, free_nbytes=3 * GIB, asked="prefetch")
    assert (strategy.name, strategy.threads, strategy.ahead_nbytes) == ("prefetch", WAITING_THREADS, FAR_AHEAD_NBYTES)
    assert strategy.exact == {"f"}  # all of them are asked for far ahead


def test_threads_that_wait_for_a_disk_read_at_places_of_their_own() -> None:
    cold = choose([parameter()], {"f": FACTS}, free_nbytes=3 * GIB)
    assert (cold.threads, cold.run_nbytes, cold.apart) == (WAITING_THREADS, WAITING_RUN_NBYTES, True)
    warm = choose([parameter()], {"f": replace(FACTS, cached_share=1.0)}, free_nbytes=3 * GIB)
    assert (warm.threads, warm.run_nbytes, warm.apart) == (THREADS, RUN_NBYTES, False)
    far = choose([parameter()], {"f": replace(FACTS, file_system="nfs")}, free_nbytes=3 * GIB)
    assert (far.run_nbytes, far.apart) == (0, False)
    past = choose([parameter()], {"f": FACTS}, free_nbytes=GIB)
    assert (past.name, past.threads, past.run_nbytes) == ("direct", THREADS, WAITING_RUN_NBYTES), "others wait for them"
    assert all(one.threads * one.slab_nbytes <= SLABS_NBYTES for one in (cold, warm, far, past))


@pytest.mark.parametrize(("rows", "exact"), [(1 << 15, set()), (1 << 14, {"f"})])
def test_a_file_of_which_a_part_is_read_is_asked_for_exactly(rows: int, exact: set[str]) -> None:
    tensor = TensorHeader("t", "uint8", (1 << 15, 1 << 15), "f", 0, GIB)
    box = Box((0, 0), (rows, 1 << 15))
    part = PlannedParameter("p", box.shape, "uint8", "uint8", (Copy(tensor, box, whole(box.shape)),))
    chosen = choose([part], {"f": FACTS, "unread": FACTS}, free_nbytes=9 * GIB)
    assert chosen.exact == exact
    assert f"{len(exact)} of 1 files are asked for" in chosen.reason


def test_no_parameters_need_no_files() -> None:
    assert choose([], {}, free_nbytes=GIB).name == "read"


@pytest.mark.parametrize(
    ("facts", "why_not", "wanted", "words"),
    [
        (FACTS, None, "gds", "was tried"),
        (replace(FACTS, file_system="nfs"), None, "gds", "was tried"),
        (FACTS, "no kvikio", "direct", "(not gds: no kvikio)"),
        (replace(FACTS, file_system="nfs"), "no kvikio", "prefetch", "(not gds: no kvikio)"),
    ],
)
def test_past_the_host_where_that_works_and_the_reason_where_it_does_not(
    facts: FileFacts, why_not: str | None, wanted: str, words: str
) -> None:
    strategy = choose([parameter()], {"f": facts}, free_nbytes=GIB, straight=lambda: why_not)
    assert strategy.name == wanted
    assert words in strategy.reason


def test_nobody_asks_for_a_way_past_the_host_where_the_page_cache_has_the_files() -> None:
    def asked() -> str | None:
        raise AssertionError("it is tried when it is asked for")

    cached = replace(FACTS, cached_share=0.9)
    assert choose([parameter()], {"f": cached}, free_nbytes=GIB, straight=asked).name == "read"
    assert choose([parameter()], {"f": FACTS}, free_nbytes=GIB, asked="direct", straight=asked).name == "direct"
