"""Manifests: whatever is decoded is true as far as it can be told, and whatever is not is a TransferError."""

from __future__ import annotations

import io
import itertools
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.fuzzing import MIB, MSGPACK_VALUES, altered, damaged, ends_in, packed
from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.errors import TransferError
from weightcached.protocol.manifest import (
    Manifest,
    ManifestMeta,
    NameAccounting,
    Row,
    contiguous_stride,
    encode_manifest,
    extent_nbytes,
)

MEMORY_MAX_BYTES = 96 * MIB
SHAPES = {"one": (2, 3), "two": (), "three": (0, 4), "four": (5,), "five": (3, 1, 2)}


def honest() -> bytes:
    rows, offset = [], 0
    for name, shape in SHAPES.items():
        nbytes = extent_nbytes(shape, contiguous_stride(shape), 4)
        rows.append(Row(name, 0, offset, nbytes, shape, contiguous_stride(shape), "float32", bytes(16)))
        offset += 256
    rows.append(Row("tied", 0, 0, 24, (2, 3), (3, 1), "float32", bytes(16), alias_of="one"))
    meta = ManifestMeta(
        generation="0" * 32,
        version="digest:1",
        receipts_version="receipts:1",
        fingerprint="f" * 64,
        config={"architecture": "LlamaForCausalLM", "model": {"eps": 1e-5, "layers": [1, None]}},
        digest=None,
        segments_nbytes=(offset,),
        bytes_read=1,
        bytes_kept=1,
        seconds={"read": 0.5},
        scalars={"scale": 1.5, "done": True, "name": None},
    )
    accounting = NameAccounting(expected=("one",), loaded=("one",), ignored={"x": "why"}, unexpected=())
    return encode_manifest(meta, rows, accounting)


HONEST = honest()
TREE: dict[str, Any] = msgpack.unpackb(HONEST)
COLUMNS: dict[str, bytes] = TREE["columns"]


def read_whole(data: bytes) -> None:
    """Decode; then look at all of it, each row by itself: one that lies is found, another is true."""
    manifest = Manifest.decode(data)
    for name in manifest.names:
        with suppress(TransferError):
            require_true(manifest, manifest.row(name))
    with suppress(TransferError):
        assert isinstance(manifest.accounting, NameAccounting)
    assert manifest.content_nbytes >= 0


def require_true(manifest: Manifest, row: Row) -> None:
    """Whoever makes a tensor of it stays inside the segment."""
    segment_nbytes = manifest.meta.segments_nbytes[row.segment]
    assert 0 <= row.offset <= row.offset + row.nbytes <= segment_nbytes
    assert row.offset % 256 == 0
    assert row.nbytes == extent_nbytes(row.shape, row.stride, DTYPES[row.dtype].itemsize_bytes)
    assert min((*row.shape, *row.stride), default=0) >= 0
    if row.alias_of is not None:
        assert manifest.row(row.alias_of).offset == row.offset


def check(data: bytes) -> None:
    ends_in(TransferError, lambda: read_whole(data), memory_max_nbytes=MEMORY_MAX_BYTES)
    ends_in(TransferError, lambda: Manifest.decode_meta(io.BytesIO(data)), memory_max_nbytes=MEMORY_MAX_BYTES)


@pytest.mark.parametrize("length", [0xFFFF, 4000], ids=["longer than the manifest", "as long as it could be"])
def test_lists_in_lists_take_no_more_room_than_a_manifest_of_that_size_can_fill(length: int) -> None:
    """As deep as the decoder goes. Room for a list is taken when its length is read."""
    data = b"\x86" + (b"\xdc" + length.to_bytes(2, "big")) * 1350
    ends_in(TransferError, lambda: Manifest.decode_meta(io.BytesIO(data)), memory_max_nbytes=40 * MIB)


@given(damaged(HONEST))
def test_a_damaged_manifest(data: bytes) -> None:
    check(data)


@given(altered(TREE, MSGPACK_VALUES))
@example({**TREE, "format": [0] * 30_000})  # found: all of it in the message
@example({**TREE, **{str(number): 0 for number in range(30_000)}})
@example({**TREE, "dtypes": [str(number) for number in range(30_000)]})
def test_altered_values(tree: Any) -> None:
    check(packed(tree))


@given(st.data())
def test_altered_columns(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=3, unique=True))
    columns = {**COLUMNS, **{name: data.draw(same_length(COLUMNS[name])) for name in names}}
    check(packed({**TREE, "columns": columns}))


@st.composite
def same_length(draw: st.DrawFn, column: bytes) -> bytes:
    """Numbers replaced, none added: the lengths are checked first, and would hide the rest."""
    data = bytearray(column)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(data) - 1)))
        value = draw(st.sampled_from([b"\0", b"\1", b"\xff", b"\xff" * 8, b"\0" * 8, b"\0" * 7 + b"\x80", b"\xff" * 7]))
        data[start : start + len(value)] = value[: len(data) - start]
    return bytes(data)


@given(st.binary(max_size=100))
def test_anything(data: bytes) -> None:
    check(data)


@given(damaged(TREE["accounting"]) | MSGPACK_VALUES.map(packed))
def test_a_damaged_account_of_names(data: bytes) -> None:
    check(packed({**TREE, "accounting": data}))


@pytest.mark.parametrize("where", ["top", "meta", "names", "columns", "accounting"])
@pytest.mark.parametrize("size", [b"\xdc\xff\xff", b"\xdd\x00\x10\x00\x00", b"\xdd\x01\xff\xff\xff"])
def test_lists_that_promise_much_in_lists_that_promise_much(where: str, size: bytes) -> None:
    """A manifest may hold long lists, so each may promise much: what they promise together is bounded all the same."""
    bomb = size * 1000 + b"\xc0" * (2 * MIB)
    if where == "accounting":
        check(packed({**TREE, "accounting": bomb}))
        return
    before = dict(itertools.takewhile(lambda item: item[0] != where, TREE.items())) if where != "top" else {}
    start = b"\x86" + b"".join(packed(word) for item in before.items() for word in item) if where != "top" else b""
    check(start + (packed(where) if where != "top" else b"") + bomb)
