"""Owns the sidecar: ``weightcached.digest.json`` beside the weights, which states their digest.

It counts only while the receipts it was made under match, or where the weights cannot be seen (a container that mounts
``config.json`` and the sidecar alone). Whoever can write it can also replace the weights beside it.

Called by :mod:`weightcached.protocol.digests`, and by a client that states a digest.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from weightcached.protocol.digest_cache import HEX, write_aside
from weightcached.protocol.errors import CheckpointError

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


def read_sidecar(model_dir: str | os.PathLike[str]) -> Sidecar | None:
    """What the directory's sidecar says, ``None`` without one. Raises :class:`CheckpointError` for a bad one."""
    path = Path(model_dir) / SIDECAR_NAME
    try:
        with open(path, "rb", opener=_open_regular) as file:
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
        raise _bad(path, f"nbytes {nbytes!r}")
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


def _open_regular(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)  # a FIFO must not hold us


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
