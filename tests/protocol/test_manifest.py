"""The manifest: whatever rows there are come back, and whatever is not true is a TransferError."""

import array
import dataclasses
import io
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcached.protocol import manifest as module
from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.errors import TransferError
from weightcached.protocol.manifest import (
    ALIGNMENT_BYTES,
    Manifest,
    ManifestMeta,
    NameAccounting,
    Row,
    align,
    contiguous_stride,
    encode_manifest,
    extent_nbytes,
)

ACCOUNTING = NameAccounting(
    expected=("a", "b"), loaded=("a",), ignored={"c": "computed by the engine"}, unexpected=("d",)
)


def meta_of(*segments_nbytes: int) -> ManifestMeta:
    return ManifestMeta(
        generation="0" * 32,
        version="digest:1",
        receipts_version="receipts:1",
        fingerprint="f" * 64,
        config={"architecture": "LlamaForCausalLM", "model": {"eps": 1e-5, "layers": [1, None]}},
        digest=None,
        segments_nbytes=segments_nbytes,
        bytes_read=1,
        bytes_kept=1,
        seconds={"read": 0.5},
        scalars={"scale": 1.5, "done": True, "name": None},
    )


def row_of(name: str, *, shape=(2, 3), offset=0, **changes) -> Row:
    row = Row(
        name=name,
        segment=0,
        offset=offset,
        nbytes=extent_nbytes(shape, contiguous_stride(shape), 4),
        shape=shape,
        stride=contiguous_stride(shape),
        dtype="float32",
        digest=bytes(16),
    )
    return dataclasses.replace(row, **changes)


@st.composite
def placed_rows(draw) -> tuple[list[Row], tuple[int, ...]]:
    """Rows of any shape (scalars, zero-size), any stride that does not run backwards, in segments without overlap."""
    ends = [0] * draw(st.integers(1, 3))
    rows: list[Row] = []
    for name in draw(st.lists(st.text(max_size=8), unique=True, max_size=12)):
        if rows and draw(st.booleans()):
            target = draw(st.sampled_from([row for row in rows if row.alias_of is None]))
            rows.append(dataclasses.replace(target, name=name, alias_of=target.name))
            continue
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        stride = contiguous_stride(shape)
        if draw(st.booleans()):
            stride = tuple(draw(st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape))))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        segment = draw(st.integers(0, len(ends) - 1))
        offset = align(ends[segment])
        nbytes = extent_nbytes(shape, stride, DTYPES[dtype].itemsize_bytes)
        ends[segment] = offset + nbytes
        kind = draw(st.sampled_from(["parameter", "buffer", "attribute"]))
        digest = draw(st.binary(min_size=16, max_size=16))
        rows.append(Row(name, segment, offset, nbytes, shape, stride, dtype, digest, kind, draw(st.booleans())))
    return draw(st.permutations(rows)), tuple(ends)


@given(placed_rows())
def test_rows_come_back_as_they_went_in(placed) -> None:
    rows, segments = placed
    meta = meta_of(*segments)
    decoded = Manifest.decode(encode_manifest(meta, rows, ACCOUNTING))
    assert list(decoded) == rows
    assert [decoded.row(row.name) for row in rows] == rows
    assert list(decoded.names) == [row.name for row in rows]
    assert len(decoded) == len(rows)
    assert decoded.meta == meta
    assert decoded.accounting == ACCOUNTING
    assert decoded.content_nbytes == sum(row.nbytes for row in rows if row.alias_of is None)
    assert list(decoded.geometries()) == [
        (row.segment, row.offset, (row.shape, row.stride, row.dtype), row.alias_of) for row in rows
    ]
    for row in rows:
        geometry = decoded.geometry(row.name)
        assert geometry._asdict() == {name: getattr(row, name) for name in geometry._fields}


class CountedFile(io.BytesIO):
    """How much of it was read."""

    nbytes = 0

    def read(self, nbytes: int | None = -1, /) -> bytes:
        data = super().read(nbytes)
        self.nbytes += len(data)
        return data


def test_the_meta_can_be_had_without_reading_rows() -> None:
    rows = [row_of(f"layer.{number}", offset=256 * number) for number in range(20_000)]
    data = encode_manifest(meta_of(256 * len(rows)), rows, ACCOUNTING)
    file = CountedFile(data)
    assert Manifest.decode_meta(file) == meta_of(256 * len(rows))
    assert file.nbytes < len(data) / 10


@pytest.mark.parametrize(
    "changed",
    [
        lambda top: {"format": 2, **{key: value for key, value in top.items() if key != "format"}},
        lambda top: {"meta": top["meta"], **top},
        lambda top: {**top, "meta": {**top["meta"], "surprise": 1}},
        lambda top: {**top, "meta": [1]},
        lambda top: {},
        lambda top: [1, 2],
        lambda top: 7,
    ],
)
def test_a_meta_that_is_not_one_is_a_transfer_error(changed: Callable[[dict[str, Any]], object]) -> None:
    top = msgpack.unpackb(encode_manifest(meta_of(24), [row_of("a")], ACCOUNTING))
    with pytest.raises(TransferError, match="bad manifest"):
        Manifest.decode_meta(io.BytesIO(msgpack.packb(changed(top))))


def test_a_meta_over_its_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "META_MAX_BYTES", 20_000)
    meta = meta_of(24).model_copy(update={"scalars": {"long": "x" * 200_000}})
    with pytest.raises(TransferError, match="BufferFull"):
        Manifest.decode_meta(io.BytesIO(encode_manifest(meta, [row_of("a")], ACCOUNTING)))


@given(st.binary(max_size=200), st.integers(0, 400))
def test_no_bytes_make_the_meta_reader_raise_anything_else(noise: bytes, cut: int) -> None:
    honest = encode_manifest(meta_of(24), [row_of("a")], ACCOUNTING)
    for data in (noise, honest[:cut] + noise):
        with suppress(TransferError):
            Manifest.decode_meta(io.BytesIO(data))


def test_a_name_that_is_not_there_is_a_key_error() -> None:
    decoded = Manifest.decode(encode_manifest(meta_of(24), [row_of("a")], ACCOUNTING))
    assert "a" in decoded
    assert "b" not in decoded
    with pytest.raises(KeyError):
        decoded.row("b")


def test_the_encoding_does_not_depend_on_anything_else() -> None:
    rows = [row_of("a"), row_of("b", offset=256)]
    assert encode_manifest(meta_of(280), rows, ACCOUNTING) == encode_manifest(meta_of(280), rows, ACCOUNTING)


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((), (), 4),
        ((0,), (1,), 0),
        ((3, 0), (7, 1), 0),
        ((2, 3), (3, 1), 24),
        ((2, 3), (1, 2), 24),
        ((2, 3), (10, 1), 52),
        ((5,), (0,), 4),
        ((1, 1), (99, 99), 4),
    ],
)
def test_extents(shape, stride, expected) -> None:
    assert extent_nbytes(shape, stride, 4) == expected


def test_offsets_are_aligned_upwards() -> None:
    assert [align(offset) for offset in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]


# What cannot be encoded

UNACCEPTABLE = {
    "a name twice": [row_of("a"), row_of("a", offset=256)],
    "an offset that is not aligned": [row_of("a", offset=8)],
    "past the end": [row_of("a", offset=1024)],
    "too many bytes": [row_of("a", nbytes=25)],
    "too few bytes": [row_of("a", nbytes=23)],
    "an unknown dtype": [row_of("a", dtype="float4")],
    "an unknown kind": [row_of("a", kind="secret")],
    "a segment that does not exist": [row_of("a", segment=1)],
    "a negative offset": [row_of("a", offset=-256)],
    "a negative stride": [row_of("a", stride=(-3, 1))],
    "a dimension over 64 bits": [row_of("a", shape=(1 << 64,))],
    "too many dimensions": [row_of("a", shape=(1,) * 256)],
    "a short digest": [row_of("a", digest=bytes(15))],
    "an alias of nothing": [row_of("a", alias_of="b")],
    "an alias of itself": [row_of("a", alias_of="a")],
    "an alias of an alias": [row_of("a"), row_of("b", alias_of="a"), row_of("c", alias_of="b")],
    "an alias elsewhere": [row_of("a"), row_of("b", offset=256, alias_of="a")],
    "an alias of another shape": [row_of("a"), row_of("b", shape=(3, 2), alias_of="a")],
    "an alias of another dtype": [row_of("a"), row_of("b", dtype="int32", alias_of="a")],
    "an alias with another digest": [row_of("a"), row_of("b", digest=b"x" * 16, alias_of="a")],
    "more elements than can be counted": [row_of("a", shape=(1 << 62, 4), stride=(0, 0), nbytes=4)],
    "more elements than can be counted, none": [row_of("a", shape=(1 << 62, 4, 0), nbytes=0)],
    "overlapping strides with too many elements": [
        row_of("a", shape=(100,) * 10, stride=(0,) * 10, nbytes=4),
    ],
    "text that is not text": [row_of("\ud800")],
}


@pytest.mark.parametrize("rows", UNACCEPTABLE.values(), ids=UNACCEPTABLE)
def test_rows_that_no_client_would_accept_are_not_encoded(rows: list[Row]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # one type for all of them is the contract
        encode_manifest(meta_of(512), rows, ACCOUNTING)


# What a lying daemon may send

ROWS = [
    row_of("a"),
    row_of("b", offset=256),
    row_of("tied", alias_of="a"),
    row_of("strided", offset=512, stride=(4, 1), nbytes=28),
    row_of("empty", offset=768, shape=(0, 3), nbytes=0),
]
HONEST = encode_manifest(meta_of(1024, 64), ROWS, ACCOUNTING)


def packed(code: str, *values: int) -> bytes:
    return array.array(code, values).tobytes()


def with_column(name: str, position: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(top: dict[str, Any]) -> None:
        code = (module._COLUMNS | module._FLAT_COLUMNS)[name]
        column = array.array(code, top["columns"][name])
        column[position] = value
        top["columns"][name] = column.tobytes()

    return change


def top_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda top: top.update(changes)


def meta_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda top: top["meta"].update(changes)


def columns_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda top: top["columns"].update(changes)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": top_with(format=2),
    "no format": lambda top: top.pop("format"),
    "a field too many": top_with(more=1),
    "a field missing": lambda top: top.pop("dtypes"),
    "meta is a list": top_with(meta=[]),
    "meta lacks a field": lambda top: top["meta"].pop("generation"),
    "meta has a field too many": meta_with(more=1),
    "meta has another generation": meta_with(generation="0" * 31),
    "meta has a negative size": meta_with(segments_nbytes=[-1]),
    "meta has a huge size": meta_with(segments_nbytes=[1 << 63]),
    "meta has seconds that are not a number": meta_with(seconds={"read": float("nan")}),
    "meta holds bytes": meta_with(config={"a": b"code"}),
    "meta is nested too deeply": meta_with(config={"a": nested(400)}),
    "meta has scalars that are lists": meta_with(scalars={"a": [1]}),
    "meta has no segments": meta_with(segments_nbytes=[]),
    "a segment too small": meta_with(segments_nbytes=[500, 64]),
    "names is text": top_with(names="abcde"),
    "names holds numbers": top_with(names=[1, 2, 3, 4, 5]),
    "a name twice": top_with(names=["a", "a", "c", "d", "e"]),
    "a name too many": top_with(names=["a", "b", "c", "d", "e", "f"]),
    "a name too few": top_with(names=["a", "b", "c", "d"]),
    "no names": top_with(names=[]),
    "no dtypes": top_with(dtypes=[]),
    "an unknown dtype": top_with(dtypes=["float4"]),
    "a dtype that is an attribute of torch": top_with(dtypes=["load"]),
    "accounting is a map": top_with(accounting={}),
    "columns is a list": top_with(columns=[]),
    "a column missing": lambda top: top["columns"].pop("kind"),
    "a column too many": columns_with(more=b""),
    "a column that is a list": columns_with(kind=[0, 0, 0, 0, 0]),
    "a column that is text": columns_with(kind="\0\0\0\0\0"),
    "a column cut inside a value": lambda top: columns_with(offset=top["columns"]["offset"][:-1])(top),
    "a column too short": lambda top: columns_with(offset=top["columns"]["offset"][:-8])(top),
    "a column too long": lambda top: columns_with(nbytes=top["columns"]["nbytes"] * 2)(top),
    "digests too short": lambda top: columns_with(digest=top["columns"]["digest"][:-1])(top),
    "dims too short": lambda top: columns_with(dims=top["columns"]["dims"][:-8])(top),
    "strides too long": lambda top: columns_with(strides=top["columns"]["strides"] + bytes(8))(top),
    "ndim too large": with_column("ndim", 4, 3),
    "a segment out of range": with_column("segment", 0, 2),
    "a row in a smaller segment": with_column("segment", 1, 1),
    "a dtype out of range": with_column("dtype", 0, 1),
    "a kind out of range": with_column("kind", 0, 3),
    "persistent out of range": with_column("persistent", 0, 2),
    "an alias out of range": with_column("alias", 0, 5),
    "an alias below -1": with_column("alias", 0, -2),
    "an alias of itself": with_column("alias", 0, 0),
    "an alias of an alias": with_column("alias", 1, 2),
    "an alias elsewhere": with_column("alias", 1, 0),
    "an offset off the grid": with_column("offset", 0, 8),
    "an offset past the end": with_column("offset", 0, 1024),
    "an offset near 2^64": with_column("offset", 0, (1 << 64) - ALIGNMENT_BYTES),
    "more bytes than the shape needs": with_column("nbytes", 0, 28),
    "fewer bytes than the shape needs": with_column("nbytes", 0, 20),
    "bytes near 2^64": with_column("nbytes", 0, (1 << 64) - 1),
    "a larger dimension": with_column("dims", 0, 3),
    "a dimension near 2^64": with_column("dims", 0, (1 << 64) - 1),
    "a negative stride": with_column("strides", 0, -3),
    "a larger stride": with_column("strides", 0, 4),
    "a huge stride": with_column("strides", 0, (1 << 63) - 1),
    "a zero stride": with_column("strides", 0, 0),
    "an empty row of uncountable shape": with_column("dims", 9, (1 << 64) - 1),
}


def read_all(data: bytes) -> None:
    """All that a client may look at."""
    decoded = Manifest.decode(data)
    for name in decoded.names:
        decoded.geometry(name)
        decoded.row(name)
    _ = decoded.accounting


def test_the_honest_manifest_is_accepted() -> None:
    read_all(HONEST)
    read_all(msgpack.packb(msgpack.unpackb(HONEST)))


@pytest.mark.parametrize("change", LIES.values(), ids=LIES)
def test_every_lie_is_a_transfer_error(change) -> None:
    top = msgpack.unpackb(HONEST)
    change(top)
    with pytest.raises(TransferError, match="manifest"):
        read_all(msgpack.packb(top))


ACCOUNTING_LIES = {
    "not msgpack": b"\xc1",
    "nothing": b"",
    "a list": b"\x90",
    "a field missing": msgpack.packb({"expected": [], "loaded": [], "ignored": {}}),
    "text for a list": msgpack.packb({"expected": "ab", "loaded": [], "ignored": {}, "unexpected": []}),
    "numbers for names": msgpack.packb({"expected": [1], "loaded": [], "ignored": {}, "unexpected": []}),
    "a list for a map": msgpack.packb({"expected": [], "loaded": [], "ignored": [["a", "b"]], "unexpected": []}),
    "a reason that is a map": msgpack.packb({"expected": [], "loaded": [], "ignored": {"a": {}}, "unexpected": []}),
    "a name that is bytes": msgpack.packb({"expected": [], "loaded": [], "ignored": {b"a": "b"}, "unexpected": []}),
    "a field too many": msgpack.packb({"expected": [], "loaded": [], "ignored": {}, "unexpected": [], "more": 1}),
}


@pytest.mark.parametrize("accounting", ACCOUNTING_LIES.values(), ids=ACCOUNTING_LIES)
def test_bad_accounting_is_found_when_asked_for(accounting: bytes) -> None:
    top = msgpack.unpackb(HONEST)
    top["accounting"] = accounting
    decoded = Manifest.decode(msgpack.packb(top))
    assert len(list(decoded)) == len(ROWS)
    with pytest.raises(TransferError):
        _ = decoded.accounting


@pytest.mark.parametrize("length", [0, 1, len(HONEST) // 2, len(HONEST) - 1])
def test_a_manifest_cut_short_is_refused(length: int) -> None:
    with pytest.raises(TransferError):
        Manifest.decode(HONEST[:length])


@pytest.mark.parametrize(
    "data",
    [
        HONEST + b"\0",
        b"\x91" * 100_000 + b"\x90",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\x01\x02",
        msgpack.packb({"format": msgpack.ExtType(1, b"x")}),
        msgpack.packb([1, 2]),
        b"cbuiltins\nopen\n(Vx\nVw\ntR.",
    ],
    ids=lambda data: repr(data[:24]),
)
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(TransferError):
        Manifest.decode(data)


def test_a_manifest_over_the_limit_is_refused_before_it_is_decoded(monkeypatch) -> None:
    monkeypatch.setattr(module, "MANIFEST_MAX_BYTES", len(HONEST) - 1)
    with pytest.raises(TransferError, match="too large"):
        Manifest.decode(HONEST)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TransferError):
        Manifest.decode(data)


@settings(max_examples=400)
@given(st.integers(0, len(HONEST) - 1), st.integers(1, 255))
def test_a_damaged_byte_is_refused_or_makes_another_valid_manifest(position: int, mask: int) -> None:
    """The digest in the grant finds damage; here nothing but a TransferError may come of it."""
    damaged = bytearray(HONEST)
    damaged[position] ^= mask
    with suppress(TransferError):
        read_all(bytes(damaged))


def test_a_hundred_thousand_rows() -> None:
    names = [f"model.layers.{number // 10}.part{number % 10}.weight" for number in range(100_000)]
    rows = [row_of(name, offset=number * 256) for number, name in enumerate(names)]
    digests = [secrets.token_bytes(16) for _ in rows]
    rows = [dataclasses.replace(row, digest=digest) for row, digest in zip(rows, digests, strict=True)]
    decoded = Manifest.decode(encode_manifest(meta_of(256 * len(rows)), rows, ACCOUNTING))
    assert len(decoded) == len(rows)
    for position in (0, 1, 50_000, 99_999):
        assert decoded.row(names[position]) == rows[position]
    assert decoded.content_nbytes == 24 * len(rows)
