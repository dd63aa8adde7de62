"""Canonical bytes: equal values encode alike, different ones differently, and what has no one encoding is refused."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcached.protocol.canonical import canonical_bytes, canonical_sha256

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def shuffled(value: object) -> object:
    """Equal, with every mapping in the opposite order and every list a tuple."""
    if isinstance(value, dict):
        return {key: shuffled(item) for key, item in reversed(value.items())}
    if isinstance(value, list):
        return tuple(shuffled(item) for item in value)
    return value


def typed(value: object) -> object:
    """A form in which Python's ``==`` tells ``1``, ``1.0`` and ``True`` apart, and ``0.0`` from ``-0.0``."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


@given(JSON)
def test_order_of_keys_and_kind_of_sequence_do_not_matter(value) -> None:
    assert canonical_bytes(shuffled(value)) == canonical_bytes(value)


@given(JSON, JSON)
def test_different_values_never_encode_alike(one, other) -> None:
    assert (canonical_bytes(one) == canonical_bytes(other)) == (typed(one) == typed(other))


def untagged(value: object) -> object:
    """What a reader of the encoding makes of it."""
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return float.fromhex(value["$float"])
        return {key.removeprefix("$"): untagged(item) for key, item in value.items()}
    return [untagged(item) for item in value] if isinstance(value, list) else value


@given(JSON)
def test_the_encoding_is_json_that_says_the_value(value) -> None:
    read = json.loads(canonical_bytes(value).decode("utf-8", "surrogatepass"))
    assert typed(untagged(read)) == typed(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, b"null"),
        ({"b": 1, "a": [True, None]}, b'{"a":[true,null],"b":1}'),
        (1.0, b'{"$float":"0x1.0000000000000p+0"}'),
        (-0.0, b'{"$float":"-0x0.0p+0"}'),
        (math.inf, b'{"$float":"inf"}'),
        (math.nan, b'{"$float":"nan"}'),
        ({"$float": "0x1.0000000000000p+0"}, b'{"$$float":"0x1.0000000000000p+0"}'),
        ("ü\ud800", b'"\xc3\xbc\xed\xa0\x80"'),
        (10**30, b"1000000000000000000000000000000"),
    ],
)
def test_pinned_encodings(value, expected) -> None:
    assert canonical_bytes(value) == expected


def test_the_digest_is_pinned() -> None:
    assert canonical_sha256({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize("value", [b"bytes", bytearray(b"x"), {1: 2}, {None: 1}, {1.5}, object(), 1j])
def test_what_has_no_canonical_form_is_refused(value) -> None:
    with pytest.raises(TypeError):
        canonical_bytes({"nested": [value]})
