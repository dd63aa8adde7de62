"""One safetensors file's header: from its bytes to checked `TensorHeader` rows.

Pure: bytes and a file size in, rows out; `checkpoint.py` does the reading. Stricter than the format's own reader
where two readers could disagree (repeated keys, unknown fields) and as strict everywhere else: tensors fill the data
exactly, in any order, with neither gap nor overlap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from weightcached.loader.collector import collector_paused
from weightcached.loader.planned import TensorHeader
from weightcached.protocol.dtypes import DTYPES_BY_CODE, dtype_of_code
from weightcached.protocol.errors import (
    DuplicateTensor,
    HeaderError,
    OverlappingTensors,
    TruncatedFile,
)
from weightcached.protocol.text import shown

PREFIX_BYTES = 8
"""The file begins with the header's length, a little-endian unsigned integer of this many bytes."""

HEADER_LIMIT_BYTES = 100_000_000
"""The format's own limit, checked before a header is read."""

_FIELDS = {"dtype", "shape", "data_offsets"}
_INTEGER_LIMIT = 1 << 63
_NAME_MAX_CHARACTERS = 4096
_DIMENSIONS_MAX = 64
"""No engine has more. Without a limit the product of a shape could take hours."""
_DOWNLOAD = "download the file again"


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What one file's header says: tensors in the order of their bytes, and its free-form ``__metadata__``."""

    tensors: tuple[TensorHeader, ...]
    metadata: Mapping[str, str]


class _Repeated(ValueError):
    """A key that stands twice in one JSON object; ``of_tensors`` where the object is the header itself."""

    def __init__(self, key: str, *, of_tensors: bool) -> None:
        super().__init__(f"key {shown(key)} stands twice")
        self.key = key
        self.of_tensors = of_tensors


def header_nbytes(prefix: bytes, *, file: str, file_nbytes: int) -> int:
    """The header's length, from the file's first bytes. Raises TruncatedFile or HeaderError before anything is read."""
    if len(prefix) < PREFIX_BYTES:
        raise TruncatedFile(
            "the file is too short to be a safetensors file",
            expected=f"at least {PREFIX_BYTES} bytes",
            found=f"{len(prefix)} bytes",
            where=file,
            next_step=_DOWNLOAD,
        )
    nbytes = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if nbytes > HEADER_LIMIT_BYTES:
        raise HeaderError(
            "the header is over its limit, or this is not a safetensors file",
            expected=f"at most {HEADER_LIMIT_BYTES} bytes",
            found=f"{nbytes} bytes",
            where=file,
        )
    if PREFIX_BYTES + nbytes > file_nbytes:
        raise TruncatedFile(
            "the file ends within its header",
            expected=f"at least {PREFIX_BYTES + nbytes} bytes",
            found=f"{file_nbytes} bytes",
            where=file,
            next_step=_DOWNLOAD,
        )
    return nbytes


def parse_header(raw: bytes, *, file: str, file_nbytes: int) -> FileHeader:
    """Parse and check the header ``raw`` (without its length) of a file of ``file_nbytes`` bytes.

    Raises HeaderError, DuplicateTensor, UnknownDtype, OverlappingTensors or TruncatedFile, naming file and tensor.
    """
    with collector_paused():
        document = _parse_json(raw, file)
        metadata = _metadata(document.pop("__metadata__", None), file)
        data_start = PREFIX_BYTES + len(raw)
        tensors = [_tensor(name, entry, file, data_start) for name, entry in document.items()]
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
        _require_filled(tensors, file, data_start, file_nbytes)
    return FileHeader(tuple(tensors), metadata)


def _parse_json(raw: bytes, file: str) -> dict[str, object]:
    try:
        if raw[:1] != b"{":
            raise ValueError("it does not begin with {")
        document: dict[str, object] = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except _Repeated as fault:
        if fault.of_tensors:
            raise DuplicateTensor(
                f"tensor {shown(fault.key)} stands twice in one header", where=file, next_step=_DOWNLOAD
            ) from None
        raise HeaderError("the header is ambiguous", found=str(fault), where=file) from None
    except (ValueError, RecursionError) as fault:  # not UTF-8, not JSON, numbers or nesting beyond Python's limits
        raise HeaderError(
            "the header is not JSON", expected="one JSON object", found=str(fault), where=file, next_step=_DOWNLOAD
        ) from None
    return document


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, value in pairs:
            if key in seen:
                raise _Repeated(key, of_tensors=isinstance(value, dict))
            seen.add(key)
    return found


def _metadata(value: object, file: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    raise HeaderError("__metadata__ is not a map of texts", found=shown(value), where=file)


def _tensor(name: str, entry: object, file: str, data_start: int) -> TensorHeader:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise _bad(name, file, "its entry is not one", expected="dtype, shape and data_offsets", found=entry)
    if len(name) > _NAME_MAX_CHARACTERS or (not name.isascii() and not _is_encodable(name)):
        expected = f"UTF-8, at most {_NAME_MAX_CHARACTERS} characters"
        raise _bad(name, file, "its name is not text, or too long", expected=expected, found=shown(name))
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(code) is not str:
        raise _bad(name, file, "its dtype is not text", expected="a dtype's name", found=code)
    if not _are_sizes(shape) or len(shape) > _DIMENSIONS_MAX:
        expected = f"at most {_DIMENSIONS_MAX} integers from 0"
        raise _bad(name, file, "its shape is impossible", expected=expected, found=shape)
    elements = math.prod(shape)
    # A zero would hide what no stride can count.
    if (elements or math.prod([extent or 1 for extent in shape])) >= _INTEGER_LIMIT:
        raise _bad(name, file, "its shape is impossible", expected="elements that can be counted", found=shape)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(name, file, "its offsets are impossible", expected="[begin, end], 0 ≤ begin ≤ end", found=offsets)
    dtype = DTYPES_BY_CODE.get(code) or dtype_of_code(code, where=f"{file}, tensor {shown(name)}")
    nbytes = elements * dtype.itemsize_bytes
    if offsets[1] - offsets[0] != nbytes:
        raise _bad(
            name,
            file,
            f"its offsets are not those of {code} {shape}",
            expected=f"{nbytes} bytes",
            found=f"{offsets[1] - offsets[0]} bytes",
        )
    return TensorHeader(name, dtype.name, tuple(shape), file, data_start + offsets[0], nbytes)


def _are_sizes(values: object) -> bool:
    """Whether this is a JSON array of integers that fit in 63 bits (``true`` is none)."""
    if type(values) is not list:
        return False
    for value in values:  # noqa: SIM110 - a generator would cost as much again
        if type(value) is not int or not 0 <= value < _INTEGER_LIMIT:
            return False
    return True


def _require_filled(tensors: list[TensorHeader], file: str, data_start: int, file_nbytes: int) -> None:
    """Tensors, sorted by offset, must follow one another from the header's end to the file's end."""
    end, before = data_start, "the header"
    fault: tuple[str, TensorHeader, str] | None = None
    for tensor in tensors:
        if tensor.offset != end and fault is None:
            fault = ("bytes overlap" if tensor.offset < end else "bytes between tensors belong to none", tensor, before)
        end, before = max(end, tensor.offset + tensor.nbytes), tensor.name
    if fault is None:
        _require_size(end, file, file_nbytes)
        return
    last = max(tensors, key=lambda tensor: tensor.offset + tensor.nbytes)
    if end > file_nbytes:
        raise _bad(
            last.name,
            file,
            "its offsets are out of range",
            expected=f"an end of at most {file_nbytes - data_start}",
            found=f"{end - data_start}",
        )
    what, tensor, before = fault
    raise OverlappingTensors(
        f"{what}, at tensor {shown(tensor.name)} after {shown(before)}",
        expected="tensors that follow one another without a gap",
        found=f"{shown(tensor.name)} at {tensor.offset - data_start} of the data",
        where=file,
        next_step=_DOWNLOAD,
    )


def _require_size(end: int, file: str, file_nbytes: int) -> None:
    if end != file_nbytes:
        what = "is truncated" if file_nbytes < end else "has bytes left over after the last tensor"
        raise TruncatedFile(
            f"the file {what}",
            expected=f"{end} bytes",
            found=f"{file_nbytes} bytes",
            where=file,
            next_step=_DOWNLOAD,
        )


def _bad(name: str, file: str, reason: str, *, expected: str, found: object) -> HeaderError:
    return HeaderError(
        f"tensor {shown(name)}: {reason}",
        expected=expected,
        found=found if isinstance(found, str) else shown(found),
        where=file,
        next_step=_DOWNLOAD,
    )


def _is_encodable(text: str) -> bool:
    """JSON can spell lone surrogates, which fail later, wherever the name is encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
