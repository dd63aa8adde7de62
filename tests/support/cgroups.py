"""A memory cgroup of one's own, for tests of limits. Needs root and a hierarchy that a child can be made in."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def memory_limit(nbytes: int) -> Iterator[Path]:
    """A child of our memory cgroup (v1 or v2) with that limit, removed at the end; skips the test where there is none.

    A process joins by writing its pid into the file ``cgroup.procs`` of the folder.
    """
    parent = _ours()
    if parent is None or not os.access(parent, os.W_OK):
        pytest.skip("no memory cgroup that a test could make a child of")
    group = parent / f"weightcached-test-{os.getpid()}"
    group.mkdir()
    try:
        limit = group / "memory.limit_in_bytes"
        (limit if limit.exists() else group / "memory.max").write_text(str(nbytes))
        yield group
    finally:
        group.rmdir()


def _ours() -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    group = Path("/sys/fs/cgroup")
    control = group / "cgroup.subtree_control"
    return group if control.exists() and "memory" in control.read_text().split() else None
