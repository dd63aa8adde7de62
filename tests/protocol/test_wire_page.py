"""The page on the wire says what the code does: its tables are compared with messages, limits, columns and codes.

A table is found by its mark, `<!-- table: NAME -->`. Compared are all columns but the last, which is for people.
"""

from __future__ import annotations

import argparse
import fcntl
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import JsonValue

from tests.support.unprivileged import ROOT
from weightcached.client import attach
from weightcached.daemon.attaching import LOADING_INTERVAL_S
from weightcached.daemon.connection import IDLE_TIMEOUT_S
from weightcached.daemon.options import add_running_arguments
from weightcached.protocol import config, errors, framing, manifest, messages, places
from weightcached.protocol.canonical import canonical_bytes
from weightcached.protocol.config import CacheConfig, Parallel, Provenance
from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.manifest import ManifestMeta
from weightcached.protocol.memory import host
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Dialect, Message
from weightcached.protocol.quantization import Quantization

PAGE = ROOT / "protocol/WIRE.md"
TEXT = PAGE.read_text()
_TABLE = re.compile(r"^<!-- table: (?P<name>[\w ]+) -->\n(?P<text>(?:^\|.*\n)+)", re.M)

_TYPES = next(line for line in TEXT.splitlines() if "Types below:" in line)

Rows = list[tuple[str, ...]]


def _cells(line: str) -> tuple[str, ...]:
    return tuple(re.sub(r"^`([^`]*)`$", r"\1", cell.strip()) for cell in line.strip()[1:-1].split("|"))


TABLES: dict[str, Rows] = {
    found["name"]: [_cells(line) for line in found["text"].splitlines()[2:]] for found in _TABLE.finditer(TEXT)
}


def told(name: str) -> Rows:
    """What a table says, without what it explains."""
    return [row[:-1] for row in TABLES[name]]


# A hint that is one of these is written so; the order decides between equals.
_WORDS: list[tuple[Any, str]] = [
    (messages.Hex32, "hex 32"),
    (messages.Hex64, "hex 64"),
    (messages.ShortText, "text 1024"),
    (messages.LongText, "text 32768"),
    (messages.Count, "uint 63"),
    (messages.Seconds, "float"),
    (manifest.Finite, "signed float"),
    (JsonValue, "any"),
    (bool, "bool"),
    (int, "int"),
    (float, "float"),
    (str, "text"),
]


def wire_type(hint: Any) -> str:
    """A type hint in the page's words."""
    for known, words in _WORDS:
        if hint == known:
            return words
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        inner = arguments[0]
        return wire_type(inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("nil" if each is type(None) else wire_type(each) for each in arguments)
    if origin is typing.Literal:
        return " or ".join(f'"{word}"' for word in arguments)
    if origin is dict:
        return f"map of {wire_type(arguments[1])}"
    if origin is tuple:
        return f"array of {wire_type(arguments[0])}"
    if isinstance(hint, type):
        return hint.__name__
    raise TypeError(f"no words for {hint!r}")


def fields_of(model: Any) -> Iterator[tuple[str, str, str]]:
    """(name, type, whether it has to be there) of every field."""
    hints = typing.get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        yield name, wire_type(hints[name]), "yes" if field.is_required() else "no"


def messages_of(dialect: Dialect) -> dict[str, type[Message]]:
    return {kind.__name__: kind for kind in dialect.types.values()}


PARTS = (
    messages.AccountingCounts,
    messages.SegmentInfo,
    messages.DifferingField,
    messages.GenerationInfo,
    messages.LeaseInfo,
    messages.Durations,
    Provenance,
    ManifestMeta,
)
MODELS: dict[str, Any] = {
    **messages_of(CLIENT_TO_DAEMON),
    **messages_of(DAEMON_TO_CLIENT),
    **{part.__name__: part for part in PARTS},
}


def test_every_table_of_the_page_is_compared_with_something() -> None:
    assert TABLES.keys() == MODELS.keys() - EMPTY | {
        "header",
        "client to daemon",
        "daemon to client",
        "limits",
        "columns",
        "manifest",
        "dtypes",
        "config",
        "codes",
    }


EMPTY = {name for name, model in MODELS.items() if not model.model_fields}


@pytest.mark.parametrize("name", sorted(MODELS.keys() - EMPTY))
def test_a_message_has_the_fields_of_its_table(name: str) -> None:
    assert told(name) == list(fields_of(MODELS[name]))


@pytest.mark.parametrize("dialect", [CLIENT_TO_DAEMON, DAEMON_TO_CLIENT], ids=lambda dialect: dialect.name)
def test_messages_have_their_numbers(dialect: Dialect) -> None:
    assert told(dialect.name) == [(str(number), kind.__name__) for number, kind in dialect.types.items()]


def test_the_header_is_laid_out_so() -> None:
    header = framing.HEADER.pack(framing.MAGIC, messages.PROTOCOL_VERSION, 0x1122, 0x33445566, 0x778899AA)
    rows = told("header")
    assert [(int(at), int(nbytes)) for at, nbytes, *_ in rows] == [(0, 4), (4, 2), (6, 2), (8, 4), (12, 4)]
    pieces = [header[int(at) : int(at) + int(nbytes)] for at, nbytes, *_ in rows]
    assert pieces[0] == b"WCD1"
    assert [int.from_bytes(piece, "little") for piece in pieces[1:]] == [1, 0x1122, 0x33445566, 0x778899AA]
    assert framing.HEADER.size == len(header) == 16


def test_limits_are_those_of_the_code() -> None:
    parser = argparse.ArgumentParser()
    add_running_arguments(parser)
    numbers = {
        "protocol version": messages.PROTOCOL_VERSION,
        "manifest format": manifest.FORMAT,
        "body from a client": messages.CLIENT_BODY_MAX_BYTES,
        "body from a daemon": messages.DAEMON_BODY_MAX_BYTES,
        "items of a body from a client": CLIENT_TO_DAEMON.items_max,
        "items of a body from a daemon": DAEMON_TO_CLIENT.items_max,
        "array from a client": CLIENT_TO_DAEMON.list_max,
        "descriptors with a frame from a client": CLIENT_TO_DAEMON.fds_max,
        "descriptors with a frame from a daemon": DAEMON_TO_CLIENT.fds_max,
        "manifest": manifest.MANIFEST_MAX_BYTES,
        "alignment of rows": manifest.ALIGNMENT_BYTES,
        "row digest": manifest.DIGEST_BYTES,
        "socket path": places.SOCKET_PATH_MAX_BYTES - len(places.BINDING_SUFFIX),
        "wait_s": int(messages.WAIT_MAX_S),
        "between two Loading": int(LOADING_INTERVAL_S),
        "request, or answer": int(parser.get_default("exchange_timeout")),
        "silence without a lease": int(IDLE_TIMEOUT_S),
        "silence before a Ping": int(inspect.signature(attach).parameters["heartbeat_s"].default),
        "value that is not abbreviated": config.ABBREVIATE_OVER_BYTES,
    }
    assert {row[0]: row[1] for row in told("limits")} == {what: str(number) for what, number in numbers.items()}


def test_seals_are_those_that_are_asked_for() -> None:
    names = set(re.findall(r"`(F_SEAL_\w+)`", TEXT))
    value = 0
    for name in names:
        value |= getattr(fcntl, name)
    assert value == host.SEALS


def test_the_manifest_has_these_parts_and_columns() -> None:
    kinds = {"u8": "B", "u16": "H", "u64": "Q", "i64": "q", "i32": "i"}
    columns = {name: kinds[width] for name, width in told("columns") if width != "16 bytes"}
    assert columns == manifest._COLUMNS | manifest._FLAT_COLUMNS
    assert {name for name, width in told("columns") if width == "16 bytes"} == {"digest"}
    assert [name for name, _ in told("manifest")] == ["format", "meta", "accounting", "names", "dtypes", "columns"]
    assert re.findall(r"(\d) `(\w+)`", TABLES["columns"][4][-1]) == [
        (str(number), kind) for number, kind in enumerate(manifest._KINDS)
    ]


def test_every_type_in_a_table_is_one_that_the_page_defines() -> None:
    defined = {"text", "map", "array", "bool", "nil", *re.findall(r"`([a-z ]+?)(?: \d+| N)?`", _TYPES)}
    said = {row[1] for name in MODELS.keys() - EMPTY for row in told(name)}
    words = {re.sub(r"^(map|array) of | \d+$|^\".*\"$", "", word) for cell in said for word in cell.split(" or ")}
    assert words - {""} - MODELS.keys() <= defined


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scalar_that_is_no_finite_number_is_in_no_manifest(value: float) -> None:
    fields = dict.fromkeys(ManifestMeta.model_fields, 0)
    with pytest.raises(ValueError, match=r"scalars\.scale"):
        ManifestMeta.model_validate({**fields, "scalars": {"scale": value}})


def test_dtypes_have_their_sizes() -> None:
    rows = [(name, str(row.itemsize_bytes)) for name, row in DTYPES.items()]
    assert sorted((name, size) for names, size in told("dtypes") for name in re.findall(r"\w+", names)) == sorted(rows)


def test_the_config_has_these_entries() -> None:
    entries = [name for name in CacheConfig.model_fields if name not in ("parallel", "quantization", "model", "engine")]
    entries += [f"parallel.{name}" for name in Parallel.model_fields]
    entries += [f"quantization.{name}" for name in Quantization.model_fields]
    assert sorted(name for (name,) in told("config")) == sorted([*entries, "model.KEY", "engine.KEY"])
    left_out = re.search(r'<a id="left-out"></a>.*? but for (?P<keys>`.*)\.$', TEXT, re.M)
    assert left_out
    assert set(re.findall(r"`(\w+)`", left_out["keys"])) == config._IRRELEVANT_TO_WEIGHTS


def test_the_canonical_encoding_is_the_one_shown() -> None:
    shown = re.search(r"<!-- canonical -->\n```json\n(?P<value>.*?)\n```\n.*?```json\n(?P<text>.*?)\n```", TEXT, re.S)
    assert shown
    value = {"b": [1, 1.5, None, True], "$a": {"é": "x"}}
    assert shown["value"] == '{"b": [1, 1.5, null, true], "$a": {"é": "x"}}'
    assert shown["text"].encode() == canonical_bytes(value)


def _branch(code: str) -> str:
    """The branch of the tree that an error is on: the class just below the root."""
    kind = errors.ERRORS_BY_CODE[code]
    return kind.__mro__[kind.__mro__.index(errors.WeightCacheError) - 1].__name__


def test_codes_are_those_of_the_error_tree() -> None:
    rows = [(code, branch) for codes, branch in told("codes") for code in re.findall(r"\w+", codes)]
    assert sorted(rows) == sorted((code, _branch(code)) for code in errors.ERRORS_BY_CODE if code != "error")


def test_what_the_page_links_to_is_there() -> None:
    links = re.findall(r"\]\((?P<path>[\w./-]+)(?:#[\w-]+)?\)", TEXT)
    assert links
    assert all((PAGE.parent / path).exists() for path in links)


def test_the_readme_links_to_the_page() -> None:
    assert "protocol/WIRE.md" in (ROOT / "README.md").read_text()
