"""Bad checkpoints: each planted fault is refused with its own error, which names the file and the tensor.

Every refusal leaves no descriptor open. What is accepted is also accepted by the format's own library, and means the
same to it.
"""

import json
import os
import struct
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import INDEX, RawTensor, raw_tensor, tiny_llama, write_checkpoint, write_safetensors
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.headers import HEADER_LIMIT_BYTES, PREFIX_BYTES, header_nbytes, parse_header
from weightcached.protocol import errors
from weightcached.protocol.dtypes import DTYPES_BY_CODE

FILE = "model.safetensors"
TENSORS = {
    "first": raw_tensor("first", (4, 6)),
    "second": raw_tensor("second", (8,)),
    "third": raw_tensor("third", (2,)),
}
"""48, 16 and 4 bytes of data."""


def refused(directory, error, *needles) -> errors.CheckpointError:
    """Opening raises exactly ``error``, whose text has every needle, and leaves no descriptor."""
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.CheckpointError) as caught:
        open_checkpoint(directory)
    assert type(caught.value) is error, caught.value
    for needle in needles:
        assert needle in str(caught.value)
    assert sorted(os.listdir("/proc/self/fd")) == before
    return caught.value


def entry(name, **fields):
    """A header edit that changes fields of one tensor's entry."""
    return lambda header: header[name].update(fields)


def swap_ends(header):
    header["second"]["data_offsets"].reverse()


def move_third(by):
    def edit(header):
        begin, end = header["third"]["data_offsets"]
        header["third"]["data_offsets"] = [begin + by, end + by]

    return edit


ENTRY_FAULTS = {
    "unknown dtype": (entry("second", dtype="Q7"), errors.UnknownDtype, ("Q7", "second")),
    "sub-byte dtype": (entry("second", dtype="F4"), errors.UnknownDtype, ("F4", "second", "smaller than a byte")),
    "dtype not text": (entry("second", dtype=["BF16"]), errors.HeaderError, ("second", "dtype")),
    "shape against bytes": (entry("second", shape=[9]), errors.HeaderError, ("second", "18 bytes", "16 bytes")),
    "another dtype's bytes": (entry("second", dtype="F32"), errors.HeaderError, ("second", "32 bytes")),
    "negative dimension": (entry("second", shape=[-8]), errors.HeaderError, ("second", "shape")),
    "dimension that is true": (entry("third", shape=[True, 2]), errors.HeaderError, ("third", "shape")),
    "dimension that is 8.0": (entry("second", shape=[8.0]), errors.HeaderError, ("second", "shape")),
    "dimensions beyond 63 bits": (entry("second", shape=[1 << 63, 0]), errors.HeaderError, ("second", "shape")),
    "dimensions that multiply to 2^64": (
        entry("second", shape=[1 << 62, 4]),
        errors.HeaderError,
        ("second", "counted"),
    ),
    "a zero that hides what cannot be counted": (
        entry("second", shape=[0, 1 << 62, 1 << 62], data_offsets=[48, 48]),
        errors.HeaderError,
        ("second", "counted"),
    ),
    "dimensions whose product takes hours": (
        entry("second", shape=[(1 << 63) - 1] * 1_000_000),
        errors.HeaderError,
        ("second", "64"),
    ),
    "shape that is a number": (entry("second", shape=8), errors.HeaderError, ("second", "shape")),
    "negative offset": (entry("first", data_offsets=[-48, 0]), errors.HeaderError, ("first", "offsets")),
    "offsets backwards": (swap_ends, errors.HeaderError, ("second", "offsets are impossible")),
    "three offsets": (entry("first", data_offsets=[0, 24, 48]), errors.HeaderError, ("first", "offsets")),
    "offset beyond 63 bits": (entry("third", data_offsets=[0, 1 << 64]), errors.HeaderError, ("third", "offsets")),
    "offsets out of range": (move_third(1 << 40), errors.HeaderError, ("third", "out of range")),
    "offsets just out of range": (move_third(4), errors.HeaderError, ("third", "out of range")),
    "bytes claimed twice": (move_third(-4), errors.OverlappingTensors, ("third", "second", "overlap")),
    "the same bytes": (move_third(-16 - 48), errors.OverlappingTensors, ("overlap",)),
    "a field too many": (entry("first", strides=[6, 1]), errors.HeaderError, ("first",)),
    "a field too few": (lambda header: header["first"].pop("shape"), errors.HeaderError, ("first",)),
    "an entry that is no object": (lambda header: header.update(first=7), errors.HeaderError, ("first",)),
    "a name that is no text": (
        lambda header: header.update({"\ud800": header.pop("third")}),
        errors.HeaderError,
        ("ud800", "name"),
    ),
    "metadata that is no object": (
        lambda header: header.update(__metadata__=[]),
        errors.HeaderError,
        ("__metadata__",),
    ),
    "metadata with a number": (
        lambda header: header.update(__metadata__={"format": 1}),
        errors.HeaderError,
        ("__metadata__",),
    ),
    "a tensor removed from the middle": (
        lambda header: header.pop("second"),
        errors.OverlappingTensors,
        ("third", "first", "belong to none"),
    ),
    "a tensor removed from the front": (
        lambda header: header.pop("first"),
        errors.OverlappingTensors,
        ("second", "the header", "belong to none"),
    ),
    "a tensor removed from the end": (lambda header: header.pop("third"), errors.TruncatedFile, ("left over",)),
}


@pytest.mark.parametrize("fault", ENTRY_FAULTS)
def test_a_header_that_lies(tmp_path, fault):
    edit, error, needles = ENTRY_FAULTS[fault]
    write_checkpoint(tmp_path, {}, {})
    write_safetensors(tmp_path / FILE, TENSORS, edit_header=edit)
    refused(tmp_path, error, FILE, *needles)


ENCODED = json.dumps({"first": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
TWICE = (
    b'{"first":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"first":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}'
)

RAW_FAULTS = {
    "not JSON": (b"{first: 1}", errors.HeaderError, ("not JSON",)),
    "cut short": (ENCODED[:-1], errors.HeaderError, ("not JSON",)),
    "more after it": (ENCODED + b"{}", errors.HeaderError, ("not JSON",)),
    "no header": (b"", errors.HeaderError, ("not JSON",)),
    "an array": (b"[]", errors.HeaderError, ("not JSON", "begin with {")),
    "a blank before it": (b" " + ENCODED, errors.HeaderError, ("begin with {",)),
    "not UTF-8": (ENCODED.replace(b"first", b"fir\xff\xfe"), errors.HeaderError, ("utf-8",)),
    "nested beyond reason": (b'{"first":' + b"[" * 200_000 + b"]" * 200_000 + b"}", errors.HeaderError, ("not JSON",)),
    "a number beyond reason": (b'{"first":' + b"9" * 5_000 + b"}", errors.HeaderError, ("not JSON",)),
    "one tensor twice": (TWICE, errors.DuplicateTensor, ("first", "twice")),
    "one field twice": (ENCODED.replace(b'"shape"', b'"dtype": "I8", "shape"'), errors.HeaderError, ("dtype", "twice")),
    "metadata twice": (b'{"__metadata__":{"a":"1","a":"2"}}', errors.HeaderError, ("'a'", "twice")),
}


@pytest.mark.parametrize("fault", RAW_FAULTS)
def test_a_header_that_is_not_one(tmp_path, fault):
    raw, error, needles = RAW_FAULTS[fault]
    write_checkpoint(tmp_path, {}, {})
    write_safetensors(tmp_path / FILE, {"first": RawTensor("U8", (1,), b"x")}, raw_header=raw)
    refused(tmp_path, error, FILE, *needles)


FILE_FAULTS: dict[str, tuple[dict[str, Any], type[errors.CheckpointError], tuple[str, ...]]] = {
    "a byte short": ({"drop_bytes": 1}, errors.TruncatedFile, ("truncated",)),
    "without its data": ({"drop_bytes": 68}, errors.TruncatedFile, ("truncated",)),
    "ends within its header": ({"drop_bytes": 69}, errors.TruncatedFile, ("within its header",)),
    "a byte left over": ({"extra": b"x"}, errors.TruncatedFile, ("left over",)),
    "a header longer than the file": ({"header_nbytes": 5_000}, errors.TruncatedFile, ("within its header", "5008")),
    "a header over the limit": ({"header_nbytes": HEADER_LIMIT_BYTES + 1}, errors.HeaderError, ("limit", "100000001")),
    "a header of 2^64 - 1": ({"header_nbytes": (1 << 64) - 1}, errors.HeaderError, ("limit",)),
    "a header of no length": ({"header_nbytes": 0}, errors.HeaderError, ("not JSON",)),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_file_that_is_not_what_its_header_accounts_for(tmp_path, fault):
    options, error, needles = FILE_FAULTS[fault]
    write_checkpoint(tmp_path, {}, {})
    write_safetensors(tmp_path / FILE, TENSORS, **options)
    refused(tmp_path, error, FILE, *needles)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_too_short_to_be_one(tmp_path, content):
    write_checkpoint(tmp_path, {}, {})
    (tmp_path / FILE).write_bytes(content)
    refused(tmp_path, errors.TruncatedFile, FILE, f"{len(content)} bytes")


def test_an_oversized_header_is_refused_before_it_is_read():
    prefix = struct.pack("<Q", HEADER_LIMIT_BYTES + 1)
    with pytest.raises(errors.HeaderError):
        header_nbytes(prefix, file=FILE, file_nbytes=1 << 40)
    assert header_nbytes(struct.pack("<Q", HEADER_LIMIT_BYTES), file=FILE, file_nbytes=1 << 40) == HEADER_LIMIT_BYTES


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def sharded(directory, first, second, index):
    write_checkpoint(directory, {}, {SHARDS[0]: first, SHARDS[1]: second}, index=index)


def test_a_tensor_in_two_shards(tmp_path):
    sharded(
        tmp_path,
        {"a": TENSORS["first"]},
        {"a": TENSORS["first"], "b": TENSORS["third"]},
        {"a": SHARDS[0], "b": SHARDS[1]},
    )
    refused(tmp_path, errors.DuplicateTensor, "'a'", *SHARDS)


def test_an_index_that_names_a_tensor_no_file_has(tmp_path):
    index = {"a": SHARDS[0], "b": SHARDS[1], "ghost": SHARDS[1]}
    sharded(tmp_path, {"a": TENSORS["first"]}, {"b": TENSORS["third"]}, index)
    refused(tmp_path, errors.MissingTensor, "'ghost'", SHARDS[1], INDEX)


def test_a_tensor_that_the_index_does_not_name(tmp_path):
    first, second = {"a": TENSORS["first"], "stowaway": TENSORS["second"]}, {"b": TENSORS["third"]}
    sharded(tmp_path, first, second, {"a": SHARDS[0], "b": SHARDS[1]})
    refused(tmp_path, errors.UnexpectedTensor, "'stowaway'", SHARDS[0], INDEX)


def test_a_tensor_in_another_file_than_the_index_says(tmp_path):
    sharded(tmp_path, {"a": TENSORS["first"]}, {"b": TENSORS["third"]}, {"a": SHARDS[1], "b": SHARDS[0]})
    refused(tmp_path, errors.IndexFileError, "another file", *SHARDS, INDEX)


def test_a_shard_that_the_index_names_and_nobody_has(tmp_path):
    directory = tiny_llama(tmp_path, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    refused(directory, errors.MissingShard, "model-00002-of-00003.safetensors")


def test_a_fault_in_the_last_of_many_files_names_that_file(tmp_path):
    directory = tiny_llama(tmp_path, shards=3)
    last = directory / "model-00003-of-00003.safetensors"
    os.truncate(last, last.stat().st_size - 1)
    refused(directory, errors.TruncatedFile, last.name)


def test_no_config(tmp_path):
    directory = tiny_llama(tmp_path)
    (directory / "config.json").unlink()
    refused(directory, errors.ModelConfigError, "config.json")


def test_only_pickle_files(tmp_path):
    write_checkpoint(tmp_path, {}, {})
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(tmp_path, errors.PickleRefused, "pytorch_model.bin")


def test_names_from_files_play_no_tricks_on_a_terminal(tmp_path):
    write_checkpoint(tmp_path, {}, {})
    write_safetensors(tmp_path / FILE, {"\x1b[2J\nname": RawTensor("Q7", (1,), b"x")})
    error = refused(tmp_path, errors.UnknownDtype)
    assert "\x1b" not in str(error)
    assert "\n" not in str(error)


numbers = st.one_of(st.integers(-2, 20), st.sampled_from([16, 48, 64, 68, 1 << 63, 1 << 64, True, 8.0, None, "8"]))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["BF16", "U8", "F32", "BOOL", "C64", "F4", "F6_E2M3", "F8_E4M3", "", "bf16"]),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, min_size=1, max_size=3),
    }
)


@st.composite
def plausible(draw):
    """A header that is right but for a few edits, and a size of the data, also mostly right."""
    names = draw(st.lists(st.sampled_from("abcdé"), unique=True, max_size=4))
    header, offset = {}, 0
    for name in names:
        code = draw(st.sampled_from(["BF16", "U8", "F32", "I64", "F8_E5M2"]))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        nbytes = DTYPES_BY_CODE[code].itemsize_bytes
        for extent in shape:
            nbytes *= extent
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    if draw(st.booleans()):
        header = dict(draw(st.permutations(list(header.items()))))
    for name in draw(st.lists(st.sampled_from("abcd"), max_size=1)):
        header[name] = draw(entries)
    return header, max(0, offset + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 8])))


def parsed_or_refused(raw, file_nbytes):
    """The header, or ``None`` when it is refused by one of our errors, which names the file."""
    refusal = None
    try:
        return parse_header(raw, file=FILE, file_nbytes=file_nbytes)
    except errors.CheckpointError as error:
        refusal = str(error)
    assert FILE in refusal
    return None


@settings(max_examples=400, deadline=None)
@given(plausible())
def test_what_is_accepted_is_what_the_format_s_own_library_accepts(case):
    header, data_nbytes = case
    raw = json.dumps(header).encode()
    file = struct.pack("<Q", len(raw)) + raw + bytes(data_nbytes)
    ours = parsed_or_refused(raw, len(file))
    try:
        theirs = dict(safetensors.deserialize(file))
    except safetensors.SafetensorError:
        theirs = None
    if ours is None:
        # We refuse more: only dtypes without whole bytes are added here.
        assert theirs is None or any(entry["dtype"] in ("F4", "F6_E2M3") for entry in theirs.values())
        return
    assert theirs is not None
    assert {t.name: list(t.shape) for t in ours.tensors} == {name: entry["shape"] for name, entry in theirs.items()}
    for tensor in ours.tensors:
        assert DTYPES_BY_CODE[theirs[tensor.name]["dtype"]].name == tensor.dtype
        assert file[tensor.offset : tensor.offset + tensor.nbytes] == bytes(theirs[tensor.name]["data"])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 1 << 20))
def test_no_bytes_make_anything_but_our_errors(raw, file_nbytes):
    for text in (raw, b"{" + raw, ENCODED[: len(raw)] + raw):
        parsed_or_refused(text, PREFIX_BYTES + len(text) + file_nbytes)
