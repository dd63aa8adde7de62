"""Strategy: how bytes get from files into a segment, and why that way.

Pure choice, from what `access.py` has seen of the files and from how much memory is free; `access.py` carries it out.

| strategy | how | chosen by ``auto`` |
| --- | --- | --- |
| ``read`` | through the page cache, which ranks of a host share | where nothing else is |
| ``prefetch`` | the same, asked for far ahead, by many threads | files far away: each answer takes long |
| ``gds`` | past the host, into a GPU's memory (GPUDirect Storage) | files not in the page cache, where it works |
| ``direct`` | past the page cache (O_DIRECT), ahead of who copies | no room there beside the shard, and nobody shares |
| ``mmap`` | copied out of a mapping of the file | never: its page faults cost more than reads |
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from weightcached.loader.planned import PlannedParameter
from weightcached.loader.reading import requests
from weightcached.loader.slabs import SLAB_NBYTES
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.worker_messages import LoadStrategy

DENSE_SHARE = 0.9
"""A file of which at least this share is read is left to the kernel's readahead: hardly any of it is in vain."""

DISTANT = frozenset({"nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "gpfs", "beegfs"})
"""File systems where an answer may come from another machine."""

CACHED_SHARE = 0.5
"""Files of which more lies in the page cache are read from there."""

THREADS = max(2, min(4, len(os.sched_getaffinity(0))))
"""Two at least: one works while the other waits for the disk. More of them wait for each other at the interpreter's
lock and at the kernel's allocator of pages.
"""

WAITING_THREADS = 16
"""Where they wait for answers most of the time: each has one request under way."""

SLABS_NBYTES = 32 << 20
"""What all threads work on at a time, together; quantizing takes about as much again for its own."""

RUN_NBYTES = 32 << 20
"""What a thread takes at a time at most: a run of slabs, which it reads, digests and writes by itself."""

WAITING_RUN_NBYTES = 128 << 20
"""The same where threads wait for a disk: the kernel reads ahead of each, further and in larger pieces the longer it
reads on from one place.
"""

AHEAD_NBYTES = 32 << 20
"""How far ahead of reading the page cache is asked to be filled, or is read past it: what a disk needs to be busy."""

FAR_AHEAD_NBYTES = 256 << 20
"""The same where each answer takes long."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What is known of one file before it is read."""

    nbytes: int
    file_system: str
    cached_share: float
    """How much of it lies in the page cache; 0 where the kernel does not tell."""
    direct: bool
    """Whether it can be read past the page cache."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """The way chosen, and the reason for the log."""

    name: LoadStrategy
    """Never ``auto``."""
    exact: frozenset[str]
    """Files whose ranges are asked for one by one, ahead of their reads, and nothing else of them. The kernel's guess,
    some MiB past the end of each range, would be other ranks' bytes."""
    threads: int
    slab_nbytes: int
    run_nbytes: int
    """Of slabs in a row, which one thread takes at a time; 0 for one slab."""
    apart: bool
    """Whether each thread waits for the disk at a place of its own in the file."""
    ahead_nbytes: int
    reason: str


def choose(
    parameters: Iterable[PlannedParameter],
    files: Mapping[str, FileFacts],
    *,
    free_nbytes: int,
    asked: LoadStrategy = "auto",
    resident_on_host: bool = True,
    straight: Callable[[], str | None] | None = None,
) -> Strategy:
    """The strategy for filling ``parameters`` from ``files``, while ``free_nbytes`` of the host's memory are free.

    ``resident_on_host``: whether what is filled takes of that; a device's memory does not. ``straight``: says, when it
    is asked, why strategy ``gds`` cannot be taken, or None; without it nobody has thought of that.
    """
    wanted = dict.fromkeys(files, 0)
    kept = resident = 0
    for parameter in parameters:
        for file, nbytes in requests(parameter):
            wanted[file] += nbytes
        kept += _kept_nbytes(parameter)
        if parameter.alias_of is None:
            resident += math.prod(parameter.shape) * itemsize_bytes(parameter.dtype)
    exact = frozenset(file for file, nbytes in wanted.items() if 0 < nbytes < DENSE_SHARE * files[file].nbytes)
    read = {file: files[file] for file, nbytes in wanted.items() if nbytes}
    total = sum(wanted.values())
    name, why = (
        (asked, "asked for")
        if asked != "auto"
        else _decide(read, total, kept, resident if resident_on_host else 0, free_nbytes, straight)
    )
    systems = ", ".join(sorted({facts.file_system for facts in read.values()})) or "nothing"
    waiting = name in ("prefetch", "direct", "gds") or (name == "read" and _cached_share(read) < CACHED_SHARE)
    threads = WAITING_THREADS if waiting and name != "direct" else THREADS  # past the page cache, others wait for them
    return Strategy(
        name,
        exact if name not in ("prefetch", "gds") else frozenset(files),
        threads,
        min(SLAB_NBYTES, SLABS_NBYTES // (WAITING_THREADS if waiting else THREADS)),
        _run_nbytes(name, waiting),
        waiting and name not in ("prefetch", "gds"),
        FAR_AHEAD_NBYTES if name == "prefetch" else AHEAD_NBYTES,
        f"{name}: {why}; {_gib(total)} of {_gib(sum(facts.nbytes for facts in files.values()))} on {systems}, "
        f"{_cached_share(read):.0%} in the page cache, {_gib(free_nbytes)} of memory free; "
        f"{len(exact)} of {len(read)} files are asked for range by range",
    )


def _run_nbytes(name: LoadStrategy, waiting: bool) -> int:
    if name == "prefetch":  # what is asked for far ahead is not far ahead of a run
        return 0
    return WAITING_RUN_NBYTES if waiting else RUN_NBYTES


def _decide(
    read: Mapping[str, FileFacts],
    total: int,
    kept: int,
    resident: int,
    free_nbytes: int,
    straight: Callable[[], str | None] | None,
) -> tuple[LoadStrategy, str]:
    if _cached_share(read) >= CACHED_SHARE:
        return "read", "most of it lies in the page cache"
    if straight is not None:
        why_not = straight()
        if why_not is None:
            return "gds", "GPUDirect Storage was tried on these files, and works"
        name, why = _decide(read, total, kept, resident, free_nbytes, None)
        return name, f"{why} (not gds: {why_not})"
    if distant := sorted({facts.file_system for facts in read.values()} & DISTANT):
        return "prefetch", f"{', '.join(distant)} may be far away"
    if total + resident <= free_nbytes:
        return "read", "the page cache has room for it"
    if total > kept:
        return "read", "ranks share the page cache, though it has no room for all"
    if not all(facts.direct for facts in read.values()):
        return "read", "the page cache has no room for it, and these files cannot be read past it"
    return "direct", "the page cache has no room for it beside the shard"


def _cached_share(files: Mapping[str, FileFacts]) -> float:
    total = sum(facts.nbytes for facts in files.values())
    return sum(facts.cached_share * facts.nbytes for facts in files.values()) / total if total else 1.0


def _kept_nbytes(parameter: PlannedParameter) -> int:
    itemsize = itemsize_bytes(parameter.source_dtype or parameter.dtype)
    return sum(copy.source.volume for copy in parameter.copies) * itemsize


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
