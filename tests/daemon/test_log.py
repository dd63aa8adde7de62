"""Logs: one record is one line, fields apart from the message, nothing that a peer wrote can forge a line."""

import io
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from weightcached.daemon.log import Damper, TextFormatter, configure


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("weightcached.daemon.keeper", logging.INFO, __file__, 1, message, (), None)
    made.__dict__.update(fields)
    made.created, made.msecs = 0.0, 7.0
    return made


def test_text_has_time_level_source_message_and_fields() -> None:
    line = TextFormatter().format(record("granted", pid=7, reason="two words", empty="", quoted='a"b'))
    assert line == ('1970-01-01T00:00:00.007Z INFO keeper: granted  pid=7 reason="two words" empty="" quoted="a\\"b"')


def test_no_field_can_begin_a_line() -> None:
    line = TextFormatter().format(record("granted", client="x\n1970-01-01 INFO keeper: forged\x1b[2J"))
    assert "\n" not in line
    assert "\x1b" not in line


@pytest.mark.parametrize("words", ["a\\", 'a\\" pid=0 b', 'a" pid=0', "a\\\\", "a\n", "\\x1b", "\x1b"])
def test_no_field_can_end_another(words: str) -> None:
    """As a reader takes it apart: quoted or not, a backslash before what stands for itself."""
    line = TextFormatter().format(record("granted", client=words, last=1))
    fields = line.split("  ", 1)[1]
    found = re.fullmatch(r'client=("(?:[^"\\]|\\.)*"|[^" =]+) last=1', fields)
    assert found is not None, fields


def test_no_error_can_begin_a_line_that_looks_like_a_record() -> None:
    try:
        raise ValueError("x\n1970-01-01T00:00:00.007Z INFO keeper: forged\r\x1b[2J")
    except ValueError:
        broken = record("failed")
        broken.exc_info = sys.exc_info()
    first, *others = TextFormatter().format(broken).split("\n")
    assert first.endswith("failed")
    assert any("forged" in line for line in others)
    for line in others:
        assert line.startswith("    ")
        assert line.isprintable()


def test_a_flood_of_complaints_is_a_few_lines_and_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("weightcached.daemon.log.time.monotonic", lambda: now_s)
    damper = Damper(per_s=3)

    def complain(message: str = "refused", level: int = logging.WARNING) -> logging.LogRecord | None:
        made = record(message)
        made.levelno = level
        return made if damper.filter(made) else None

    assert [complain() is not None for _ in range(100)] == [True] * 3 + [False] * 97
    assert complain("something else") is not None
    assert all(complain(level=logging.INFO) for _ in range(100))
    now_s += 1
    first = complain()
    assert first is not None
    assert "suppressed=97" in TextFormatter().format(first)
    second = complain()
    assert second is not None
    assert "suppressed" not in TextFormatter().format(second)


@pytest.fixture
def root() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.usefixtures("root")
def test_json_is_one_object_a_line_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure(format_name="json", level="info", place="default/host-tp0of1")
    log = logging.getLogger("weightcached.daemon.keeper")
    log.info("published", extra={"seconds": {"read": 0.5}, "text": "a\nb"})
    log.debug("not shown")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "published"
    assert abs(datetime.fromisoformat(first["time"]).timestamp() - time.time()) < 60
    assert first["level"] == "INFO"
    assert first["place"] == "default/host-tp0of1"
    assert first["seconds"] == {"read": 0.5}
    assert first["text"] == "a\nb"
    assert "ValueError: why" in second["exc_info"]
