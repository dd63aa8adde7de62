"""Owns receipts: stat evidence that open files are the ones already digested, taken after stores have been settled.

A receipt is (device, inode, size, mtime, ctime) of the very descriptor that is read. Equal receipts prove equal content
only where :mod:`weightcached.protocol.filesystems` believes inode and ctime. Not noticed: stores through a shared
mapping on a file system where ``fsync`` does not settle them (ext4 does), edits by root below the file system, what
hardware does.

Called through :mod:`weightcached.protocol.content` by keeper, worker and client.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from weightcached.protocol.canonical import canonical_sha256
from weightcached.protocol.errors import CheckpointChanged, CheckpointError
from weightcached.protocol.filesystems import Judgement, judge

YOUNG_NS = 2_000_000_000
"""Two edits closer together than a file system's clock ticks can leave one ctime. The coarsest tick is 2 s."""

# What fsync says on a file system that cannot write back at all. Nothing is unsettled there, but nothing is promised.
_NO_FSYNC = frozenset({errno.EINVAL, errno.EROFS, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True)
class Receipt:
    """One file's evidence. ``name`` is its plain name in the checkpoint, whatever the file is called elsewhere."""

    name: str
    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True)
class Receipts:
    """Evidence of all files of a checkpoint at one moment."""

    entries: tuple[Receipt, ...]
    """Sorted by name; the index is one of them."""
    taken_ns: int
    """Wall clock just before the first file was looked at."""
    trusted: bool
    """Whether equal receipts prove equal content here."""
    rule: str
    """Which rule decided ``trusted``."""

    @cached_property
    def sha256(self) -> str:
        """What travels and what keys the cache: SHA-256 over names and numbers, nothing else."""
        rows = [[getattr(entry, field.name) for field in fields(Receipt)] for entry in self.entries]
        return canonical_sha256({"receipts": 1, "files": rows})

    @property
    def nbytes(self) -> int:
        """Bytes of all files, index included."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def settled_at_ns(self) -> int:
        """The wall-clock moment from which a further edit is certain to move some ctime."""
        return max(entry.ctime_ns for entry in self.entries) + YOUNG_NS

    def is_young(self, now_ns: int | None = None) -> bool:
        """Whether, at ``now_ns`` (default: when they were taken), an edit could still go unnoticed.

        Ask for the moment *before* reading began: an edit right after it must move ctime for a later comparison to mean
        anything. Young receipts are not remembered. A ctime in the future is young: somebody's clock is wrong.
        """
        return (self.taken_ns if now_ns is None else now_ns) < self.settled_at_ns

    def require_same(self, after: Receipts) -> None:
        """Raise :class:`CheckpointChanged`, naming files and fields, unless ``after`` (taken later) is equal."""
        if self.entries == after.entries:
            return
        before_by_name = {entry.name: entry for entry in self.entries}
        after_by_name = {entry.name: entry for entry in after.entries}
        changes = []
        for name in sorted(before_by_name.keys() | after_by_name.keys()):
            old, new = before_by_name.get(name), after_by_name.get(name)
            if old != new:
                changes.append(f"{name} ({', '.join(_differences(old, new))})")
        raise CheckpointChanged(
            "the checkpoint changed while it was read",
            expected="the same files before and after",
            found="; ".join(changes[:8]),
            next_step="let whoever writes it finish, then start again",
        )


def take_receipts(fds: Mapping[str, int], *, also_trusted: Collection[str] = ()) -> Receipts:
    """Settle (``fsync``) and stat each open file of ``fds``, a mapping from name to descriptor that is not empty.

    Blocks while dirty pages are written back; a clean file costs microseconds. ``also_trusted`` names file systems that
    the operator trusts beyond :data:`weightcached.protocol.filesystems.TRUSTED`. Raises :class:`CheckpointError` when a
    file cannot be written back or looked at (its bytes in memory may then differ from those on disk).
    """
    taken_ns = time.time_ns()
    entries, judgements = [], []
    for name in sorted(fds):
        fd = fds[name]
        try:
            settled = _settle(fd)
            status = os.fstat(fd)
            judgement = judge(fd, also_trusted=also_trusted)
        except OSError as error:
            raise CheckpointError(
                "a file of the checkpoint cannot be settled", found=error.strerror, where=name
            ) from error
        if not settled and not judgement.by_operator:
            judgement = Judgement(False, f"its file system has no fsync, although {judgement.rule}")
        entries.append(
            Receipt(name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        )
        judgements.append(judgement)
    trusted, rule = _together([entry.name for entry in entries], judgements)
    return Receipts(tuple(entries), taken_ns, trusted, rule)


def _settle(fd: int) -> bool:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in _NO_FSYNC:
            return False
        raise
    return True


def _together(names: list[str], judgements: list[Judgement]) -> tuple[bool, str]:
    """One file that is not trusted decides for all, and is named."""
    for name, judgement in zip(names, judgements, strict=True):
        if not judgement.trusted:
            return False, f"{name}: {judgement.rule}"
    return True, "; ".join(dict.fromkeys(judgement.rule for judgement in judgements))


def _differences(old: Receipt | None, new: Receipt | None) -> list[str]:
    if old is None or new is None:
        return ["appeared" if old is None else "is gone"]
    return [field.name for field in fields(Receipt) if getattr(old, field.name) != getattr(new, field.name)]
