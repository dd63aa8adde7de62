"""Owns the sidecar: ``weightcached.digest.json`` beside the weights, which states their digest.

It counts only while the receipts it was made under match, or where the weights cannot be seen (a container that mounts
``config.json`` and the sidecar alone). Beside weights that can be seen it counts only if root or we wrote it: a daemon
vouches to others for the digest of what it loaded, and must not take the word of whoever made the directory for it.

Called by :mod:`weightcached.protocol.digests`, and by a client that states a digest.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from weightcached.protocol.digest_cache import HEX, write_aside
from weightcached.protocol.errors import CheckpointError
from weightcached.protocol.regular_files import open_regular
from weightcached.protocol.text import shown

SIDECAR_NAME = "weightcached.digest.json"
_LIMIT_BYTES = 64 << 10


@dataclass(frozen=True)
class Sidecar:
    """What a sidecar says."""

    digest: str
    """64 hex digits."""
    receipts: str | None
    """SHA-256 of the receipts it was made under; ``None`` when they would prove nothing (young, or not trusted)."""
    nbytes: int
    """Bytes of the weight files, for people."""


def read_sidecar(model_dir: str | os.PathLike[str], *, ours_only: bool = False) -> Sidecar | None:
    """What the directory's sidecar says, ``None`` without one. Raises :class:`CheckpointError` for a bad one, and with
    ``ours_only`` for one that somebody else than root or ourselves could have written.
    """
    path = Path(model_dir) / SIDECAR_NAME
    try:
        with open(path, "rb", opener=open_regular) as file:
            if ours_only:
                _require_ours(path, os.fstat(file.fileno()))
            document = json.loads(file.read(_LIMIT_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _bad(path, error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise _bad(path, "not JSON") from error
    if not isinstance(document, dict) or document.keys() != {"schema", "digest", "receipts", "nbytes"}:
        raise _bad(path, "other fields")
    digest, receipts, nbytes = document["digest"], document["receipts"], document["nbytes"]
    if document["schema"] != 1 or not _is_hex(digest) or not (receipts is None or _is_hex(receipts)):
        raise _bad(path, "other values")
    if type(nbytes) is not int or nbytes < 0:
        raise _bad(path, f"nbytes {shown(nbytes)}")
    return Sidecar(digest, receipts, nbytes)


def write_sidecar(model_dir: str | os.PathLike[str], sidecar: Sidecar) -> Path:
    """Puts the sidecar beside the weights in one step and returns its path. Raises :class:`CheckpointError`."""
    directory = Path(model_dir)
    document = {"schema": 1, "digest": sidecar.digest, "receipts": sidecar.receipts, "nbytes": sidecar.nbytes}
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            body = json.dumps(document, indent=1).encode() + b"\n"
            write_aside(f".{SIDECAR_NAME}.{os.getpid()}", SIDECAR_NAME, body, directory_fd=fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(
            "the sidecar cannot be written", found=error.strerror, where=directory / SIDECAR_NAME
        ) from error
    return directory / SIDECAR_NAME


def _require_ours(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _bad(path, f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}: others could have written it")


def _is_hex(value: object) -> bool:
    return isinstance(value, str) and HEX.fullmatch(value) is not None


def _bad(path: Path, found: str | None) -> CheckpointError:
    return CheckpointError(
        "the sidecar cannot be used",
        expected="what `weightcached digest --write-sidecar` writes",
        found=found,
        where=path,
        next_step="remove it, or write it again",
    )
