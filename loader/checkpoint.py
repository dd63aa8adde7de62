"""A checkpoint opened for loading: its descriptors, its ``config.json``, and every tensor's header, all checked.

Owns the open descriptors until closed: each file is opened once, its header is read through that descriptor, and
whoever reads weights later or takes receipts uses the same one, so no file can be swapped in between. Reads headers
only, never weights. Which files count is `protocol/content.py`'s to say; what one header may say is `headers.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from weightcached.loader.headers import HEADER_LIMIT_BYTES, PREFIX_BYTES, FileHeader, header_nbytes, parse_header
from weightcached.loader.planned import TensorHeader
from weightcached.protocol.config import read_model_config
from weightcached.protocol.content import (
    OpenWeights,
    Receipts,
    WeightFiles,
    open_weights,
    take_receipts,
    weight_files,
)
from weightcached.protocol.errors import (
    CheckpointError,
    DuplicateTensor,
    HeaderError,
    IndexFileError,
    MissingTensor,
    TruncatedFile,
    UnexpectedTensor,
)
from weightcached.protocol.text import shown

__all__ = ["Checkpoint", "TensorHeader", "open_checkpoint"]

HEADERS_LIMIT_BYTES = 2 * HEADER_LIMIT_BYTES
"""Of all files together: they are held in memory at ten times their size, and the largest checkpoints have a tenth of
it."""


@dataclass(frozen=True)
class Checkpoint:
    """What `open_checkpoint` found. A context manager: closing it closes ``files``; mappings made from them live on."""

    directory: Path
    tensors: dict[str, TensorHeader]
    config: dict[str, Any]
    """``config.json``."""
    files: OpenWeights
    """File name → open descriptor, of every weight file and the index; owned."""
    receipts: Receipts
    """Of ``files``, taken before the first header was read: whoever reads weights compares with them afterwards."""
    metadata: Mapping[str, Mapping[str, str]]
    """File name → the ``__metadata__`` of its header."""
    ignored_files: Mapping[str, str]
    """Files that look like weights and are not used → why."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.files.files.locate(error)
        self.close()

    def close(self) -> None:
        """Close every descriptor. Safe to call again."""
        self.files.close()


def open_checkpoint(model_dir: str | os.PathLike[str], *, also_trusted: Collection[str] = ()) -> Checkpoint:
    """Open the checkpoint in ``model_dir`` and check it whole, weights aside. The caller closes what it gets.

    ``also_trusted`` names file systems, as for ``take_receipts``. Blocks for the directory, ``config.json``, the index
    and the headers, and while files that were just written are written back. Raises ModelConfigError or another
    CheckpointError that names file and tensor; then nothing stays open.
    """
    directory = Path(model_dir)
    config = read_model_config(directory)
    chosen = weight_files(directory)
    files = open_weights(chosen)
    try:
        receipts = take_receipts(files, also_trusted=also_trusted)
        headers = _read_headers(chosen.names, files)
        tensors = _merged(headers)
        _require_index_agrees(chosen, tensors)
    except BaseException as error:
        chosen.locate(error)
        files.close()
        raise
    metadata = {name: header.metadata for name, header in headers.items()}
    return Checkpoint(directory, tensors, config, files, receipts, metadata, chosen.ignored)


def _read_headers(names: Collection[str], files: Mapping[str, int]) -> dict[str, FileHeader]:
    headers: dict[str, FileHeader] = {}
    left = HEADERS_LIMIT_BYTES
    for name in names:
        raw, file_nbytes = _raw_header(name, files[name])
        left -= len(raw)
        if left < 0:
            raise HeaderError(
                "the headers of the checkpoint's files are too large together",
                expected=f"at most {HEADERS_LIMIT_BYTES} bytes",
                found=f"more, in {len(headers) + 1} of {len(names)} files",
                where=name,
            )
        headers[name] = parse_header(raw, file=name, file_nbytes=file_nbytes)
    return headers


def _raw_header(name: str, fd: int) -> tuple[bytes, int]:
    """The header's bytes, and how large the file is."""
    try:
        file_nbytes = os.fstat(fd).st_size
        nbytes = header_nbytes(_read_at(fd, PREFIX_BYTES, 0), file=name, file_nbytes=file_nbytes)
        raw = _read_at(fd, nbytes, PREFIX_BYTES)
    except OSError as fault:
        raise CheckpointError("a file's header cannot be read", found=fault.strerror, where=name) from fault
    if len(raw) < nbytes:
        raise TruncatedFile(
            "the file became shorter while its header was read", expected=nbytes, found=len(raw), where=name
        )
    return raw, file_nbytes


def _read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """``nbytes`` bytes of the file from ``offset``; fewer only at the file's end."""
    pieces: list[bytes] = []
    while nbytes > 0:
        piece = os.pread(fd, nbytes, offset)
        if not piece:
            break
        pieces.append(piece)
        nbytes -= len(piece)
        offset += len(piece)
    return b"".join(pieces)


def _merged(headers: Mapping[str, FileHeader]) -> dict[str, TensorHeader]:
    """All tensors by name. Raises DuplicateTensor when a name stands in two files."""
    tensors: dict[str, TensorHeader] = {}
    for header in headers.values():
        for tensor in header.tensors:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise DuplicateTensor(
                    f"tensor {shown(tensor.name)} stands in two files",
                    expected="one file",
                    found=f"{other.file} and {tensor.file}",
                    where=tensor.file,
                    next_step="remove the copy that is not part of this checkpoint",
                )
    return tensors


def _require_index_agrees(chosen: WeightFiles, tensors: Mapping[str, TensorHeader]) -> None:
    """Every tensor the index names is in the file it says, and no file has another one."""
    if chosen.weight_map is None:
        return
    for name, file in chosen.weight_map.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise MissingTensor(
                f"the index names tensor {shown(name)}, which no file has",
                expected=f"{shown(name)} in {file}",
                where=chosen.index,
                next_step="download the index and its files again, from one revision",
            )
        if tensor.file != file:
            raise IndexFileError(
                f"tensor {shown(name)} is in another file than the index says",
                expected=file,
                found=tensor.file,
                where=chosen.index,
                next_step="download the index and its files again, from one revision",
            )
    for name, tensor in tensors.items():
        if name not in chosen.weight_map:
            raise UnexpectedTensor(
                f"tensor {shown(name)} is in a file but not in the index",
                expected=f"only what {chosen.index} names",
                where=tensor.file,
                next_step="download the index and its files again, from one revision",
            )
