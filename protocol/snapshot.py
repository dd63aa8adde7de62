"""A snapshot on disk: one rank's finished shard with its manifest, as files. How it is written and opened.

``DIR/<device>/manifest`` is the manifest behind a magic and its SHA-256; beside it lies each segment, byte for byte, as
``<generation>.<number>``. The manifest is written last and renamed into place, so it is the commit mark: a snapshot is
the old one or the new one, whoever is killed. Row digests are checked by whoever loads (``loader/snapshot.py``). A
snapshot vouches for the content it was made from, so only one that root or we own, and nobody else can write, counts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from weightcached.protocol.config import CacheConfig, explain_differences
from weightcached.protocol.digest_cache import write_aside
from weightcached.protocol.errors import SnapshotMismatch, SnapshotUnusable, SnapshotUnwritable, TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import MANIFEST_MAX_BYTES, Manifest
from weightcached.protocol.memory.kinds import SegmentBytes
from weightcached.protocol.regular_files import open_regular

MANIFEST_NAME = "manifest"
_MAGIC = b"WCDSNAP1"
_MAGIC_OF_ANY_RELEASE = b"WCDSNAP"
_HEAD_NBYTES = len(_MAGIC) + hashlib.sha256().digest_size
_PIECE_NBYTES = 8 << 20
_FIELDS_SHOWN = 8
_OURS = re.compile(r"\.?[0-9a-f]{32}\.[0-9]+(\.new)?|\.manifest\.new")
"""What a writer may have left in the folder: segments, and what was written aside."""


@dataclass(frozen=True)
class Snapshot:
    """An opened snapshot: its manifest, and a descriptor of each segment's file. Made by :func:`open_snapshot`."""

    folder: Path
    manifest: Manifest
    files: dict[str, int]
    """Segment file name → descriptor, in the order of the segments."""

    @property
    def digest(self) -> str:
        """The content digest of the checkpoint that it was made from."""
        digest = self.manifest.meta.digest
        if digest is None:
            raise SnapshotUnusable("the snapshot does not say which content it was made from", where=self.folder)
        return digest

    def require_config(self, asked: CacheConfig) -> None:
        """Raises SnapshotMismatch naming each field in which the snapshot's config is not the one that is asked for.

        In whose memory the bytes were, or will be, does not matter: they are the same.
        """
        try:
            config = CacheConfig.model_validate(self.manifest.meta.config)
        except ValidationError as error:
            first = error.errors()[0]
            raise SnapshotMismatch(
                "the snapshot's configuration is not one that this release knows",
                expected=first["msg"],
                found=".".join(map(str, first["loc"])),
                where=self.folder,
                next_step="make it again with this release",
            ) from error
        if config.fingerprint != self.manifest.meta.fingerprint:  # a field has come since, or is gone
            raise SnapshotMismatch(
                "another release has taken the fingerprint of the snapshot's configuration",
                expected=config.fingerprint,
                found=self.manifest.meta.fingerprint,
                where=self.folder,
                next_step="make it again with this release",
            )
        asked = asked.model_copy(update={"memory": config.memory, "device": config.device})
        if config.fingerprint == asked.fingerprint:
            return
        differences = explain_differences(config.entries(), asked.entries())
        more = len(differences) - _FIELDS_SHOWN
        shown = [f"{one.field}: it has {one.daemon!r}, {one.client!r} is asked for" for one in differences]
        raise SnapshotMismatch(
            "the snapshot is of another configuration",
            found="; ".join(shown[:_FIELDS_SHOWN]) + (f"; and {more} more" if more > 0 else ""),
            where=self.folder,
            next_step="ask for what it has, or make it again with `weightcached snapshot save`",
        )


@contextmanager
def open_snapshot(directory: Path, device: str) -> Iterator[Snapshot]:
    """The snapshot of the rank whose device word this is. Reads the manifest; of segments only their sizes.

    Raises SnapshotUnusable for one that is not there, not whole, or that others could have written, SnapshotMismatch
    for another release's.
    """
    folder = directory / device
    with OwnedFds() as owned:
        manifest = _read_manifest(folder, directory)
        files = {}
        for number, nbytes in enumerate(manifest.meta.segments_nbytes):
            name = f"{manifest.meta.generation}.{number}"
            fd = _open(folder / name)
            owned.append(fd)
            if (found := os.fstat(fd).st_size) != nbytes:
                raise _unusable(f"segment {number} is not whole", folder / name, f"{nbytes} bytes", f"{found} bytes")
            files[name] = fd
        yield Snapshot(folder, manifest, files)


def _read_manifest(folder: Path, directory: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    if not os.path.lexists(path):
        there = sorted(entry.parent.name for entry in directory.glob(f"*/{MANIFEST_NAME}"))
        raise SnapshotUnusable(
            "there is no snapshot of this rank",
            expected=path,
            found=f"snapshots of {', '.join(there)}" if there else "none at all",
            next_step="make it with `weightcached snapshot save`, or load without --snapshot",
        )
    fd = _open(path)
    with open(fd, "rb") as file:
        if (nbytes := os.fstat(fd).st_size) > _HEAD_NBYTES + MANIFEST_MAX_BYTES:
            raise _unusable("the manifest is too large", path, f"at most {MANIFEST_MAX_BYTES} bytes", nbytes)
        data = file.read()
    if data[: len(_MAGIC)] != _MAGIC:
        if data.startswith(_MAGIC_OF_ANY_RELEASE):
            raise SnapshotMismatch(
                "the snapshot was written by another release",
                expected=_MAGIC.decode(),
                found=ascii(data[: len(_MAGIC)])[2:-1],
                where=path,
                next_step="make it again with this release",
            )
        raise _unusable("the manifest's file is not one", path, _MAGIC.decode(), ascii(data[: len(_MAGIC)]))
    body = memoryview(data)[_HEAD_NBYTES:]
    wanted, found = data[len(_MAGIC) : _HEAD_NBYTES], hashlib.sha256(body).digest()
    if wanted != found:
        raise _unusable("the manifest is damaged or torn", path, f"SHA-256 {wanted.hex()}", f"SHA-256 {found.hex()}")
    try:
        return Manifest.decode(body)
    except TransferError as error:  # its bytes are as they were written: another release wrote them
        raise SnapshotMismatch(
            "this release cannot read the snapshot's manifest",
            found=error,
            where=path,
            next_step="make it again with this release",
        ) from error


def _open(path: Path) -> int:
    """A descriptor of a file that nobody else can have written; the caller's."""
    try:
        fd = open_regular(path)
    except OSError as error:
        raise _unusable("a file of the snapshot cannot be opened", path, "a readable file", error.strerror) from error
    status = os.fstat(fd)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        raise _unusable(
            "others could have written a file of the snapshot",
            path,
            f"owner {os.geteuid()} or root, writable by its owner only",
            f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}",
        )
    return fd


def _unusable(message: str, where: Path, expected: object, found: object) -> SnapshotUnusable:
    return SnapshotUnusable(
        message,
        expected=expected,
        found=found,
        where=where,
        next_step="make it again with `weightcached snapshot save`, or load without --snapshot",
    )


def write_snapshot(directory: Path, device: str, *, manifest: bytes, segments: Sequence[SegmentBytes]) -> Path:
    """Write the snapshot and return its folder; one that was there is replaced in the last step, and then removed.

    Blocks until all of it is on the disk. Raises SnapshotUnwritable, and then what was there before is still whole.
    """
    folder = directory / device
    generation = Manifest.decode(manifest).meta.generation
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            names = [f"{generation}.{number}" for number in range(len(segments))]
            for name, segment in zip(names, segments, strict=True):
                _write_segment(f".{name}.new", name, segment, folder_fd)
            head = _MAGIC + hashlib.sha256(manifest).digest()
            write_aside(f".{MANIFEST_NAME}.new", MANIFEST_NAME, head + manifest, directory_fd=folder_fd)
            _remove_all_but(names, folder_fd)
        finally:
            os.close(folder_fd)
    except BlockingIOError as error:
        raise SnapshotUnwritable("another process is writing this snapshot", where=folder) from error
    except OSError as error:
        raise SnapshotUnwritable(
            "the snapshot cannot be written",
            expected=f"{sum(map(len, segments)) + len(manifest)} bytes of room, and the right to write",
            found=error.strerror,
            where=folder,
        ) from error
    return folder


def _write_segment(aside: str, name: str, data: SegmentBytes, folder_fd: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(aside, dir_fd=folder_fd)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder_fd)
    try:
        try:
            if len(data):
                os.posix_fallocate(fd, 0, len(data))  # a disk that is too small says so at once
            for start in range(0, len(data), _PIECE_NBYTES):
                _write_all(fd, data[start : start + _PIECE_NBYTES])
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(aside, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=folder_fd)
        raise


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        written = os.write(fd, data[done:])
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        done += written


def _remove_all_but(names: Sequence[str], folder_fd: int) -> None:
    """Segments of earlier snapshots, and what killed writers left. Whoever has them open still reads them."""
    for entry in os.listdir(folder_fd):
        if _OURS.fullmatch(entry) and entry not in names:
            os.unlink(entry, dir_fd=folder_fd)
