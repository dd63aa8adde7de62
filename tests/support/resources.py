"""What a process holds, for tests that count it before and after: descriptors, mappings, threads, memory."""

import functools
import gc
import os
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from weightcached.client.transformers.loading import CLOSING


def open_fds(pid: int | str = "self") -> dict[int, str]:
    """Descriptor → what it is, of this process or another. Without the one that reading the list needs."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:  # the list's own descriptor, or one closed meanwhile
            continue
    return found


def memfd_mappings(pid: int | str = "self") -> list[str]:
    """The lines of ``/proc/PID/maps`` that are memfds."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
        return [line for line in file if "/memfd:" in line]


def anonymous_nbytes(pid: int | str = "self") -> int:
    """The process's own memory (RssAnon)."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class Holding:
    """What a process holds. Whatever it leaves behind makes one of these more."""

    descriptors: Counter[str]
    """By what they are: `socket`, `/memfd`, …"""
    memfds_nbytes: int
    """Sizes of those that it has a descriptor of, each counted once."""
    mappings_nbytes: list[int]
    """Of each mapping of a memfd."""
    threads: int
    children: int


def holding(pid: int) -> Holding:
    """Counted now. FileNotFoundError where there is no such process."""
    fds, memfds = open_fds(pid), {}
    for fd, what in fds.items():
        if what.startswith("/memfd:"):
            with suppress(FileNotFoundError):  # closed meanwhile
                status = os.stat(f"/proc/{pid}/fd/{fd}")
                memfds[status.st_ino] = status.st_size
    extents = [line.split(" ", 1)[0].split("-") for line in memfd_mappings(pid)]
    threads = os.listdir(f"/proc/{pid}/task")
    children = [Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii") for thread in threads]
    return Holding(
        descriptors=Counter(what.split(":")[0] for what in fds.values()),
        memfds_nbytes=sum(memfds.values()),
        mappings_nbytes=sorted(int(end, 16) - int(start, 16) for start, end in extents),
        threads=len(threads),
        children=sum(len(line.split()) for line in children),
    )


@contextmanager
def more_descriptors_allowed(count: int) -> Iterator[None]:
    """This process may have ``count`` descriptors, as far as its hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, count), hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@functools.cache
def _set_aside_what_is_loaded() -> None:
    """Take modules out of the collector's work, once: it would go through all of them around each test."""
    gc.collect()
    gc.freeze()


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """When the block ends well, this process has the descriptors, mapped memfds and threads that it had before."""

    _set_aside_what_is_loaded()

    def held() -> tuple[dict[int, str], list[str], list[str]]:
        gc.collect()
        for thread in threading.enumerate():  # what an earlier test's model had may be on its way out
            if thread.name == CLOSING:
                thread.join()
        return open_fds(), memfd_mappings(), sorted(thread.name for thread in threading.enumerate())

    before = held()
    yield
    after = held()
    assert after == before, f"before: {before}\nafter: {after}"


@contextmanager
def quick_collections() -> Iterator[None]:
    """Collecting garbage in the block takes no time: nothing that is there now is looked at."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class MemfdMapping:
    """One mapping of a memfd into this process, as ``/proc/self/smaps`` has it. Addresses are ``[start, end)``."""

    start: int
    end: int
    own_nbytes: int
    """Of pages that this process has written to, and so has copies of."""


def own_memfd_mappings() -> list[MemfdMapping]:
    """Those of this process, with what it has copied of each."""
    found: list[MemfdMapping] = []
    inside = False
    with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            key, _, value = line.partition(" ")
            if not key.endswith(":"):  # a mapping's first line: its addresses
                start, end = (int(address, 16) for address in key.split("-"))
                inside = "/memfd:" in value
                if inside:
                    found.append(MemfdMapping(start, end, 0))
            elif inside and key == "Anonymous:":
                found[-1] = replace(found[-1], own_nbytes=int(value.split()[0]) * 1024)
    return found


def private_nbytes() -> int:
    """Bytes of mapped memfds that are this process's own: pages that it has written to, and nobody else sees."""
    return sum(mapping.own_nbytes for mapping in own_memfd_mappings())
