"""What fuzz tests share: honest input altered in ways that decoders mind, and the promise that every decoder keeps.

    @given(damaged(HONEST))
    def test_no_bytes_are_more_than_an_error(data: bytes) -> None:
        ends_in(ProtocolError, lambda: decode(data))

How many examples are tried is the hypothesis profile's to say (`tests/conftest.py`): a hundred for each test, or, with
`pytest --hypothesis-profile=thorough`, thousands. What they found stays beside them as `@example`, or as a test with a
name where it was more than a missing check.
"""

from __future__ import annotations

import copy
import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgpack
from hypothesis import strategies as st

MIB = 1024 * 1024
CPU_MAX_S = 10.0
"""For one input of a few kilobytes, tracing included: what is found is what does not end."""
TEXT_MAX_CHARACTERS = 20_000

_T = TypeVar("_T")


def ends_in(
    errors: type[Exception] | tuple[type[Exception], ...],
    decode: Callable[[], _T],
    *,
    memory_max_nbytes: int = 16 * MIB,
) -> _T | None:
    """What ``decode`` returns, or ``None`` where it raised one of ``errors``.

    Whatever else it raises is raised. AssertionError where it took more memory than that at one moment, or for ever, or
    where the error's text cannot be shown on a terminal.
    """
    cpu_s = time.thread_time()
    tracemalloc.start()
    result: _T | None = None
    try:
        result = decode()
    except errors as error:
        text = str(error)
        assert text.isprintable(), text
        assert len(text) <= TEXT_MAX_CHARACTERS, len(text)
    finally:
        _, peak_nbytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_nbytes <= memory_max_nbytes, f"{peak_nbytes} bytes at one moment"
    assert time.thread_time() - cpu_s <= CPU_MAX_S
    return result


# Bytes

_TOKENS = (
    b"\0",
    b"\xff" * 4,
    b"\xff" * 8,
    # msgpack: more than there is, everything nested, kinds that nobody sends
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xdc\xff\xff" * 1100,
    b"\xdc\x01\xff" * 1000,
    b"\x91" * 1100,
    b"\x81\xa0" * 1100,
    b"\xc1",
    b"\xd6\xff\0\0\0\0",
    b"\xcb\x7f\xf8\0\0\0\0\0\0",
    b"\xa3\xed\xa0\x80",
    # JSON
    b"[" * 3000,
    b'{"":' * 3000,
    b"9" * 5000,
    b"-1",
    b"1e999",
    b"NaN",
    b"-Infinity",
    b'"\\ud800"',
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b'"__class__"',
    # lines
    b"\n",
    b"=",
    b"\x1b[2J",
)


@st.composite
def damaged(draw: st.DrawFn, honest: bytes, *, edits_max: int = 4) -> bytes:
    """``honest`` with a few edits: bytes changed, cut out, repeated, or something nasty put between."""
    data = bytearray(honest)
    for _ in range(draw(st.integers(1, edits_max))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 40)))
        kind = draw(st.sampled_from(["change", "change", "cut", "end", "repeat", "insert", "token"]))
        if kind == "change" and start < len(data):
            data[start] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[start:end]
        elif kind == "end":
            del data[start:]
        elif kind == "repeat":
            data[start:start] = data[start:end] * draw(st.integers(1, 50))
        elif kind == "insert":
            data[start:end] = draw(st.binary(max_size=20))
        elif kind == "token":
            data[start:end] = draw(st.sampled_from(_TOKENS))
    return bytes(data)


# Trees of dictionaries and lists


def _many_keys(count: int) -> dict[str, int]:
    return {str(number): number for number in range(count)}


INTEGERS = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, 1, -1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63])
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["", ".", "..", "/", "\0", "\x1b[2J\n", "é" * 2000, "a" * 70_000, "\u202e"]
)
LEAVES = st.none() | st.booleans() | INTEGERS | st.floats() | TEXTS
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
) | st.sampled_from(["list", "keys"]).map(lambda kind: [0] * 3000 if kind == "list" else _many_keys(3000))
MSGPACK_VALUES: st.SearchStrategy[Any] = (
    JSON_VALUES
    | st.binary(max_size=40)
    | st.dictionaries(INTEGERS, LEAVES, min_size=1, max_size=2)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
)


@st.composite
def altered(draw: st.DrawFn, honest: Any, values: st.SearchStrategy[Any], *, edits_max: int = 3) -> Any:
    """A copy of ``honest`` in which a few values, at any depth, are replaced, taken out or added."""
    root = [copy.deepcopy(honest)]
    for _ in range(draw(st.integers(1, edits_max))):
        container, key = _anywhere(draw, root)
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if kind == "replace" or container is root:
            container[key] = draw(values)
        elif kind == "remove":
            del container[key]
        elif isinstance(container, dict):
            container[draw(TEXTS)] = draw(values)
        else:
            container.append(draw(values))
    return root[0]


def _anywhere(draw: st.DrawFn, root: list[Any]) -> tuple[Any, Any]:
    """A place in the tree: its container, and the key there."""
    container: Any = root
    key: Any = 0
    while isinstance(found := container[key], dict | list) and found and draw(st.integers(0, 3)):
        container = found
        key = draw(st.sampled_from(sorted(found, key=repr))) if isinstance(found, dict) else _position(draw, found)
    return container, key


def _position(draw: st.DrawFn, items: list[Any]) -> int:
    return draw(st.integers(0, len(items) - 1))


def packed(value: Any) -> bytes:
    """msgpack of any tree, also of one that no frame may carry: lone surrogates as they come."""
    data: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return data


def plain(value: Any) -> Any:
    """A tree of dictionaries and lists, from one that has other mappings and tuples."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
