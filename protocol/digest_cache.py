"""Owns the per-host cache of content digests: receipts' SHA-256 → digest, one small JSON file each.

An entry is written aside, synced and renamed. Whoever computes holds the entry's lock, so that others who ask for the
same files wait and then read the result instead of computing it again. The directory must belong to us or to root and
be writable by nobody else, for an entry is believed.

Only :mod:`weightcached.protocol.digests` calls it. A cache that cannot be written (full, read-only, no home) is a
warning, never a failure: the digest itself does not depend on it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from weightcached.protocol.errors import InvalidOption

ENVIRONMENT_VARIABLE = "WEIGHTCACHED_CACHE_DIR"
HEX = re.compile(r"[0-9a-f]{64}")
_ENTRY_LIMIT_BYTES = 64 << 10


def cache_directory(
    explicit: str | os.PathLike[str] | None = None, *, environ: Mapping[str, str] = os.environ, uid: int | None = None
) -> Path | None:
    """The option, else ``WEIGHTCACHED_CACHE_DIR``, else ``/var/cache`` for root and the user's own cache for others.

    ``None`` for a user without a home, as containers have them: then nothing is remembered.
    """
    if explicit is not None:
        return Path(explicit)
    if named := environ.get(ENVIRONMENT_VARIABLE):
        return Path(named)
    if (os.geteuid() if uid is None else uid) == 0:
        return Path("/var/cache/weightcached")
    base = environ.get("XDG_CACHE_HOME", "")  # a relative one is to be ignored, says the specification
    if not base.startswith("/"):
        base = os.path.expanduser("~/.cache")
    return Path(base) / "weightcached" if base.startswith("/") else None


@dataclass(frozen=True)
class DigestCache:
    """A directory of entries. Holds nothing open between calls; any number of processes may share it."""

    directory: Path | None

    @contextmanager
    def opened(self, warnings: list[str]) -> Iterator[Shelf]:
        """The cache for one question. What goes wrong inside is told in ``warnings``.

        Raises :class:`InvalidOption` when somebody else could have written here.
        """
        if self.directory is None:
            warnings.append(f"digests cannot be remembered: no home directory; set {ENVIRONMENT_VARIABLE}")
            yield Shelf(None, warnings)
            return
        try:
            self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            warnings.append(f"digests cannot be remembered: {self.directory}: {error.strerror}")
            yield Shelf(None, warnings)
            return
        try:
            _require_ours(self.directory, os.fstat(fd))
            yield Shelf(fd, warnings)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class Shelf:
    """An open cache directory (or none, when it could not be opened); made by :meth:`DigestCache.opened` alone."""

    directory_fd: int | None
    warnings: list[str]

    def recall(self, receipts: str) -> str | None:
        """The digest (hex) remembered for these receipts. An entry that cannot be read is a warning and ``None``."""
        if self.directory_fd is None:
            return None
        try:
            fd = os.open(_entry(receipts), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.warnings.append(f"cache entry {receipts} cannot be read: {error.strerror}")
            return None
        with os.fdopen(fd, "rb") as file:
            raw = file.read(_ENTRY_LIMIT_BYTES)
        digest = _parse_entry(raw, receipts)
        if digest is None:
            self.warnings.append(f"cache entry {receipts} is damaged and will be made again")
        return digest

    def remember(self, receipts: str, digest: str) -> bool:
        """Writes the entry, in one's turn only; a crash leaves the old state or the new. True if it was written."""
        if self.directory_fd is None:
            return False
        body = json.dumps({"schema": 1, "receipts": receipts, "digest": digest}).encode() + b"\n"
        aside = f"{receipts}.new"  # one name: only the holder of the entry's lock writes it
        try:
            write_aside(aside, _entry(receipts), body, directory_fd=self.directory_fd)
        except OSError as error:
            self.warnings.append(f"the digest is not remembered: {error.strerror}")
            return False
        return True

    @contextmanager
    def turn(self, receipts: str) -> Iterator[Shelf]:
        """Waits (without bound) until nobody else computes this entry; yields the shelf on which to remember it.

        Where there can be no lock that is a shelf that remembers nothing, and a warning. The lock file is private, or
        anybody who may read it could hold it for ever. It is gone when its holder is done.
        """
        lock = self._lock(f"{receipts}.lock")
        try:
            yield self if lock is not None else replace(self, directory_fd=None)
        finally:
            if lock is not None:
                with suppress(OSError):  # only tidiness: a lock file that stays is as good as a new one
                    os.unlink(f"{receipts}.lock", dir_fd=self.directory_fd)
                os.close(lock)

    def _lock(self, name: str) -> int | None:
        while self.directory_fd is not None:
            try:
                fd = os.open(
                    name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.directory_fd
                )
            except OSError as error:
                self.warnings.append(f"digests cannot be remembered: no lock: {error.strerror}")
                return None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if self._is_named(fd, name):
                    return fd
            except OSError as error:
                os.close(fd)
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                self.warnings.append(f"digests cannot be remembered: no lock: {error.strerror}")
                return None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its holder took the name away while we waited: stand in line at the new one
        return None

    def _is_named(self, fd: int, name: str) -> bool:
        try:
            named = os.stat(name, dir_fd=self.directory_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(fd))


def write_aside(aside: str, name: str, body: bytes, *, directory_fd: int, mode: int = 0o644) -> None:
    """Puts ``body`` at ``name`` in one step: written to ``aside``, synced, renamed. On OSError nothing is left.

    What was at ``aside`` (left by a crash, or planted: a FIFO, a link to somebody's file) is removed, not opened.
    """
    with suppress(FileNotFoundError):
        os.unlink(aside, dir_fd=directory_fd)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=directory_fd)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(fd)
        os.replace(aside, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    except BaseException:
        os.unlink(aside, dir_fd=directory_fd)
        raise
    os.fsync(directory_fd)


def _entry(receipts: str) -> str:
    return f"{receipts}.json"


def _parse_entry(raw: bytes, receipts: str) -> str | None:
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("schema") != 1 or entry.get("receipts") != receipts:
        return None
    digest = entry.get("digest")
    return digest if isinstance(digest, str) and HEX.fullmatch(digest) else None


def _require_ours(directory: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise InvalidOption(
            "the digest cache belongs to somebody else",
            expected=f"owner {os.geteuid()} or root",
            found=f"owner {status.st_uid}",
            where=directory,
            next_step=f"name another directory with --cache-dir or {ENVIRONMENT_VARIABLE}",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidOption(
            "the digest cache can be written by others",
            expected="a directory that only its owner writes",
            found=stat.filemode(status.st_mode),
            where=directory,
            next_step=f"chmod go-w {directory}, or name another directory with --cache-dir or {ENVIRONMENT_VARIABLE}",
        )
