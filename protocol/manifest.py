"""The table from parameter names to places in segments, and how it becomes bytes.

Owns :class:`Row`, :class:`ManifestMeta`, the encoding and its checks. Pure: memory is the memory kinds' business.
The worker encodes, the client decodes; the keeper passes the bytes on and reads the meta of one that it adopts, but
never decodes rows.

The encoding is one msgpack map, in this order: ``format``, ``meta``, ``accounting`` (a msgpack map kept as bytes,
decoded when asked for), ``names``, ``dtypes`` and ``columns``. Numeric columns are packed little-endian arrays, because
100,000 rows as lists or maps decode three to twenty times slower. Rows are made when they are asked for.
"""

from __future__ import annotations

import array
import functools
import itertools
import math
import operator
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, BinaryIO, Literal, NamedTuple

import msgpack
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.errors import TransferError
from weightcached.protocol.messages import Count, Hex32, Hex64, Seconds, ShortText
from weightcached.protocol.text import shown

FORMAT = 1
MANIFEST_MAX_BYTES = 512 * 1024 * 1024
META_MAX_BYTES = 32 * 1024 * 1024
"""Twice the largest ``config.json``, which it holds."""
_META_READ_BYTES = 16 * 1024
ALIGNMENT_BYTES = 256
DIGEST_BYTES = 16

Kind = Literal["parameter", "buffer", "attribute"]
_KINDS: tuple[Kind, ...] = ("parameter", "buffer", "attribute")
_NO_ALIAS = -1
_ELEMENTS_MAX = (1 << 63) - 1

# Column name → array type code: u8 B, u16 H, u64 Q, i64 q, i32 i.
_COLUMNS = {
    "segment": "H",
    "offset": "Q",
    "nbytes": "Q",
    "dtype": "B",
    "kind": "B",
    "persistent": "B",
    "alias": "i",
    "ndim": "B",
}
_FLAT_COLUMNS = {"dims": "Q", "strides": "q"}

_Form = tuple[tuple[int, ...], tuple[int, ...], str]
"""Shape, stride, dtype."""


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter's place. ``stride`` counts elements; ``nbytes`` is the extent in the segment that it may touch.

    ``alias_of`` names the row whose place this is: tied parameters are one place with several names. ``digest`` is
    XXH3-128 over the resident bytes of the extent.
    """

    name: str
    segment: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    digest: bytes
    kind: Kind = "parameter"
    persistent: bool = True
    alias_of: str | None = None


class Geometry(NamedTuple):
    """How a row's elements lie, checked: all that making a tensor needs, at a fifth of a :class:`Row`'s cost."""

    segment: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    alias_of: str | None


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a C-contiguous tensor of ``shape``."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def extent_nbytes(shape: Sequence[int], stride: Sequence[int], itemsize_bytes: int) -> int:
    """Bytes from the first element to the end of the last one; 0 for a tensor without elements."""
    if 0 in shape:
        return 0
    last = 0
    for extent, step in zip(shape, stride, strict=True):
        last += (extent - 1) * step
    return (last + 1) * itemsize_bytes


Finite = Annotated[float, Field(allow_inf_nan=False)]


class ManifestMeta(BaseModel):
    """What a manifest says about the generation as a whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    generation: Hex32
    version: ShortText
    receipts_version: ShortText
    fingerprint: Hex64
    config: dict[str, JsonValue]
    digest: Hex64 | None
    segments_nbytes: tuple[Count, ...]
    bytes_read: Count
    bytes_kept: Count
    seconds: dict[str, Seconds]
    scalars: dict[str, bool | int | Finite | str | None] = Field(default_factory=dict)
    """Scalars and flags that post-processing left outside tensors."""


@dataclass(frozen=True)
class NameAccounting:
    """What became of every checkpoint tensor: expected by the layout, loaded, ignored (with the reason), unexpected."""

    expected: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()


def encode_manifest(meta: ManifestMeta, rows: Sequence[Row], accounting: NameAccounting) -> bytes:
    """Encode; the order of ``rows`` is kept. A row that :meth:`Manifest.row` would refuse is a ValueError here."""
    try:
        data = _encoded(meta, rows, accounting)
        decoded = Manifest.decode(data)
        for _ in decoded:
            pass
    except (KeyError, OverflowError, TransferError) as error:
        raise ValueError(f"rows that no client would accept: {error}") from error
    return data


def _encoded(meta: ManifestMeta, rows: Sequence[Row], accounting: NameAccounting) -> bytes:
    position = {row.name: number for number, row in enumerate(rows)}
    dtypes = sorted({row.dtype for row in rows})
    columns: dict[str, Sequence[int]] = {
        "segment": [row.segment for row in rows],
        "offset": [row.offset for row in rows],
        "nbytes": [row.nbytes for row in rows],
        "dtype": [dtypes.index(row.dtype) for row in rows],
        "kind": [_KINDS.index(row.kind) for row in rows],
        "persistent": [int(row.persistent) for row in rows],
        "alias": [_NO_ALIAS if row.alias_of is None else position[row.alias_of] for row in rows],
        "ndim": [len(row.shape) for row in rows],
        "dims": list(itertools.chain.from_iterable(row.shape for row in rows)),
        "strides": list(itertools.chain.from_iterable(row.stride for row in rows)),
    }
    codes = _COLUMNS | _FLAT_COLUMNS
    packed = {name: _pack(codes[name], values) for name, values in columns.items()}
    packed["digest"] = b"".join(row.digest for row in rows)
    data: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "meta": meta.model_dump(),
            "accounting": msgpack.packb(
                {
                    "expected": list(accounting.expected),
                    "loaded": list(accounting.loaded),
                    "ignored": dict(accounting.ignored),
                    "unexpected": list(accounting.unexpected),
                }
            ),
            "names": list(position),
            "dtypes": dtypes,
            "columns": packed,
        }
    )
    return data


def _pack(code: str, values: Sequence[int]) -> bytes:
    column = array.array(code, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _unpack(code: str, data: object, *, name: str, count: int | None = None) -> array.array[int]:
    column: array.array[int] = array.array(code)
    if not isinstance(data, bytes) or len(data) % column.itemsize:
        raise _bad(f"column {name} is not packed {code!r} values")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    if count is not None and len(column) != count:
        raise _bad(f"column {name} has another length than the names", expected=count, found=len(column))
    return column


def _bad(message: str, *, expected: object = None, found: object = None, where: object = None) -> TransferError:
    return TransferError(f"bad manifest: {message}", expected=expected, found=found, where=where)


class Manifest:
    """A decoded manifest: a mapping-like view from names to rows. Made by :meth:`decode` only."""

    def __init__(
        self,
        meta: ManifestMeta,
        names: list[str],
        dtypes: list[str],
        columns: dict[str, array.array[int]],
        digests: bytes,
        accounting: bytes,
    ) -> None:
        self.meta = meta
        self.names: Sequence[str] = names
        self._position = dict(zip(names, range(len(names)), strict=True))
        self._dtypes = dtypes
        self._columns = columns
        self._digests = digests
        self._accounting = accounting
        self._dims, self._strides = (columns[name].tobytes() for name in _FLAT_COLUMNS)
        self._dims_start = [*map(operator.mul, itertools.accumulate(columns["ndim"], initial=0), itertools.repeat(8))]
        """Where each row's part of both begins, in bytes."""
        self._forms: dict[tuple[bytes, bytes, int, int], _Form] = {}
        self._geometry_columns = tuple(columns[name] for name in ("segment", "offset", "nbytes", "dtype", "alias"))

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Manifest:
        """Decode and check everything that does not need a row by row look. Raises TransferError."""
        if len(data) > MANIFEST_MAX_BYTES:
            raise _bad("too large", expected=f"at most {MANIFEST_MAX_BYTES} bytes", found=len(data))
        try:
            top = msgpack.unpackb(data, strict_map_key=True, max_ext_len=0)
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise _bad("not msgpack", found=f"{type(error).__name__}: {error}"[:200]) from error
        wanted = {"format", "meta", "accounting", "names", "dtypes", "columns"}
        if not isinstance(top, dict) or top.get("format") != FORMAT:
            found = top.get("format") if isinstance(top, dict) else top
            raise _bad("unknown format", expected=FORMAT, found=shown(found))
        if top.keys() != wanted:
            raise _bad("wrong fields", expected=sorted(wanted), found=shown(sorted(map(str, top))))
        meta = _meta(top["meta"])
        names, dtypes = _strings("names", top["names"]), _strings("dtypes", top["dtypes"])
        if unknown := [name for name in dtypes if name not in DTYPES]:
            raise _bad("unknown dtype", found=shown(unknown))
        columns, digests = _columns(top["columns"], count=len(names))
        if not isinstance(top["accounting"], bytes):
            raise _bad("accounting is not bytes")
        manifest = cls(meta, names, dtypes, columns, digests, top["accounting"])
        manifest._check()
        return manifest

    @staticmethod
    def decode_meta(file: BinaryIO) -> ManifestMeta:
        """Only what is said about the generation as a whole, from ``file``'s position on. Rows are not even read, so
        the cost does not grow with them: this is for the keeper. Raises TransferError; OSError passes through.
        """
        begin = file.tell()
        left_nbytes = file.seek(0, os.SEEK_END) - begin
        file.seek(begin)
        unpacker = msgpack.Unpacker(
            file,
            read_size=_META_READ_BYTES,
            max_buffer_size=META_MAX_BYTES,
            # Room for a list is taken when its length is read, and a thousand lists may lie in each other.
            max_array_len=left_nbytes,
            strict_map_key=True,
            max_ext_len=0,
        )
        try:
            unpacker.read_map_header()
            found = []
            for wanted in ("format", "meta"):
                if (key := unpacker.unpack()) != wanted:
                    raise _bad("wrong fields", expected=wanted, found=str(key)[:100])
                found.append(unpacker.unpack())
                if found[0] != FORMAT:
                    raise _bad("unknown format", expected=FORMAT, found=str(found[0])[:100])
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise _bad("not msgpack", found=f"{type(error).__name__}: {error}"[:200]) from error
        return _meta(found[1])

    def _check(self) -> None:
        columns, count = self._columns, len(self.names)
        if len(self._position) != count:
            raise _bad("a name stands twice")
        flat = self._dims_start[-1] // 8
        for name in _FLAT_COLUMNS:
            if len(columns[name]) != flat:
                raise _bad(f"column {name} does not match ndim", expected=flat, found=len(columns[name]))
        if not count:
            return
        segments = self.meta.segments_nbytes
        limits = {
            "segment": len(segments),
            "dtype": len(self._dtypes),
            "kind": len(_KINDS),
            "persistent": 2,
            "alias": count,
        }
        for name, limit in limits.items():
            lowest = _NO_ALIAS if name == "alias" else 0
            present = set(columns[name])
            if min(present) < lowest or max(present) >= limit:
                raise _bad(f"column {name} is out of range", expected=f"{lowest} to {limit - 1}")
        if min(columns["strides"], default=0) < 0:
            raise _bad("a negative stride", expected="0 or more", found=min(columns["strides"]))
        if functools.reduce(operator.or_, columns["offset"]) % ALIGNMENT_BYTES:
            raise _bad("a row is not aligned", expected=f"a multiple of {ALIGNMENT_BYTES} bytes")
        ends = map(operator.add, columns["offset"], columns["nbytes"])
        if len(segments) == 1:
            inside = max(ends) <= segments[0]
        else:
            inside = all(map(operator.le, ends, map(segments.__getitem__, columns["segment"])))
        if not inside:
            raise _bad("a row reaches past the end of its segment")

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._position

    def __iter__(self) -> Iterator[Row]:
        return (self._row(number) for number in range(len(self.names)))

    def row(self, name: str) -> Row:
        """The row of ``name``, checked against its own shape, stride and dtype. KeyError; TransferError if it lies."""
        return self._row(self._position[name])

    def geometry(self, name: str) -> Geometry:
        """The same as :meth:`row`, without what no view of the memory needs. Raises what :meth:`row` raises."""
        return self._geometry(self._position[name])

    def geometries(self) -> Iterator[tuple[int, int, _Form, str | None]]:
        """(segment, offset, form, alias of) of every row in order, at half the price of asking for each.

        Raises what :meth:`row` raises, when it comes to the row that lies.
        """
        dims, strides, forms, first = self._dims, self._strides, self._forms, 0
        for number, (segment, offset, extent, dtype, alias, last) in enumerate(
            zip(*self._geometry_columns, self._dims_start[1:], strict=True)
        ):
            key = (dims[first:last], strides[first:last], dtype, extent)
            first = last
            form = forms.get(key) or self._checked_form(key, number)
            if alias == _NO_ALIAS:
                yield segment, offset, form, None
            else:
                yield segment, offset, form, self._geometry(number).alias_of

    def _row(self, number: int) -> Row:
        columns, geometry = self._columns, self._geometry(number)
        return Row(
            name=self.names[number],
            segment=geometry.segment,
            offset=geometry.offset,
            nbytes=geometry.nbytes,
            shape=geometry.shape,
            stride=geometry.stride,
            dtype=geometry.dtype,
            digest=self._digest(number),
            kind=_KINDS[columns["kind"][number]],
            persistent=bool(columns["persistent"][number]),
            alias_of=geometry.alias_of,
        )

    def _geometry(self, number: int) -> Geometry:
        segments, offsets, extents, dtypes, aliases = self._geometry_columns
        first, last = self._dims_start[number], self._dims_start[number + 1]
        key = (self._dims[first:last], self._strides[first:last], dtypes[number], extents[number])
        shape, stride, dtype = self._forms.get(key) or self._checked_form(key, number)
        alias = aliases[number]
        target = None if alias == _NO_ALIAS else self.names[alias]
        # A named tuple's own constructor would cost as much as all the rest.
        geometry = tuple.__new__(Geometry, (segments[number], offsets[number], key[3], shape, stride, dtype, target))
        if target is not None:
            self._check_alias(geometry, number, alias)
        return geometry

    def _checked_form(self, key: tuple[bytes, bytes, int, int], number: int) -> _Form:
        """Shape, stride and dtype behind ``key``, if they need exactly its bytes. Layers repeat forms: made once."""
        dims, strides, dtype_number, nbytes = key
        shape, stride = tuple(memoryview(dims).cast("Q")), tuple(memoryview(strides).cast("q"))
        dtype = self._dtypes[dtype_number]
        expected = extent_nbytes(shape, stride, DTYPES[dtype].itemsize_bytes)
        where = self.names[number]
        if nbytes != expected:
            raise _bad("a row's bytes are not what its shape needs", expected=expected, found=nbytes, where=where)
        # Strides that overlap, or a zero, let few bytes claim any number of elements.
        elements = math.prod(shape) or math.prod(extent or 1 for extent in shape)
        if elements > _ELEMENTS_MAX:
            raise _bad("a row has more elements than can be counted", found=shape, where=where)
        return self._forms.setdefault(key, (shape, stride, dtype))

    def _check_alias(self, geometry: Geometry, number: int, alias: int) -> None:
        same = (
            self._columns["alias"][alias] == _NO_ALIAS
            and self._geometry(alias)._replace(alias_of=geometry.alias_of) == geometry
        )
        if not same or self._digest(alias) != self._digest(number):
            raise _bad("an alias is not the row it names", where=self.names[number])

    def _digest(self, number: int) -> bytes:
        return self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    @functools.cached_property
    def accounting(self) -> NameAccounting:
        """What became of every checkpoint tensor. Decoded on first use; TransferError when it is not valid."""
        try:
            value = msgpack.unpackb(self._accounting, strict_map_key=True, max_ext_len=0)
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise _bad("accounting is not valid", found=f"{type(error).__name__}: {error}"[:200]) from error
        if not isinstance(value, dict) or value.keys() != {"expected", "loaded", "ignored", "unexpected"}:
            raise _bad("accounting has wrong fields")
        ignored = value["ignored"]
        if not isinstance(ignored, dict):
            raise _bad("ignored is not a map")
        reasons = _strings("reasons", list(ignored.values()))
        return NameAccounting(
            expected=tuple(_strings("expected", value["expected"])),
            loaded=tuple(_strings("loaded", value["loaded"])),
            ignored=dict(zip(_strings("ignored", list(ignored)), reasons, strict=True)),
            unexpected=tuple(_strings("unexpected", value["unexpected"])),
        )

    @property
    def content_nbytes(self) -> int:
        """Bytes of all parameters, each place once."""
        pairs = zip(self._columns["nbytes"], self._columns["alias"], strict=True)
        return sum(nbytes for nbytes, alias in pairs if alias == _NO_ALIAS)


def _meta(value: object) -> ManifestMeta:
    try:
        return ManifestMeta.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise _bad("meta is not valid", found=str(error)[:500]) from error


def _strings(name: str, value: object) -> list[str]:
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:  # msgpack makes no other strings
        raise _bad(f"{name} is not a list of strings")
    return value


def _columns(value: object, *, count: int) -> tuple[dict[str, array.array[int]], bytes]:
    wanted = {*_COLUMNS, *_FLAT_COLUMNS, "digest"}
    if not isinstance(value, dict) or value.keys() != wanted:
        raise _bad("wrong columns", expected=sorted(wanted))
    columns = {name: _unpack(code, value[name], name=name, count=count) for name, code in _COLUMNS.items()}
    columns |= {name: _unpack(code, value[name], name=name) for name, code in _FLAT_COLUMNS.items()}
    digests = value["digest"]
    if not isinstance(digests, bytes) or len(digests) != count * DIGEST_BYTES:
        raise _bad("column digest has another length than the names", expected=count * DIGEST_BYTES)
    return columns, digests


def align(offset: int) -> int:
    """``offset`` rounded up to the alignment of parameters in a segment (256 bytes)."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
