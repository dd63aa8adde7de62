"""Strategy: how bytes get from the checkpoint's files into a segment, and why that way.

Pure choice; `reading.py` carries it out. One way to read so far: into a small buffer, and from there into the segment.
What is chosen is who decides what the page cache is filled with ahead of the reads. Others (direct I/O, prefetch into
huge pages) belong here, as rules over the file system, free memory and the access pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightcached.loader.planned import PlannedParameter
from weightcached.loader.reading import requests

DENSE_SHARE = 0.9
"""A file of which at least this share is read is left to the kernel's readahead: hardly any of it is in vain."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """The way chosen, and the reason for the log."""

    exact: frozenset[str]
    """Files whose ranges are asked for one by one, ahead of their reads, and nothing else of them. The kernel's guess,
    some MiB past the end of each range, would be other ranks' bytes."""
    reason: str


def choose(parameters: Iterable[PlannedParameter], files_nbytes: Mapping[str, int]) -> Strategy:
    """The strategy for filling ``parameters`` from files of these sizes."""
    wanted = dict.fromkeys(files_nbytes, 0)
    for parameter in parameters:
        for file, nbytes in requests(parameter):
            wanted[file] += nbytes
    exact = frozenset(file for file, nbytes in wanted.items() if nbytes < DENSE_SHARE * files_nbytes[file])
    share = sum(wanted.values()) / max(1, sum(files_nbytes.values()))
    return Strategy(
        exact,
        f"read into a small buffer and write whole pages, since taking fresh pages costs more than reading; "
        f"{share:.0%} of the files is read, so readahead is the kernel's for {len(wanted) - len(exact)} of them and "
        f"exact for {len(exact)}",
    )
