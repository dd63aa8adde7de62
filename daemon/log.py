"""Structured logs on standard error: one record is one line, as readable text or as JSON.

Owns the two formats, and that nobody can fill a disk with complaints about them. Everybody logs with the standard
library: a short message that does not vary, and what varies as fields in ``extra=``. Field names must not be attributes
of ``logging.LogRecord`` (``name``, ``args``, …).
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from weightcached.daemon.text import one_line

LOGGER = "weightcached"
COMPLAINTS_PER_S = 50
"""Of one kind: a hostile client is worth a line, and not a thousand a second."""
_KINDS_MAX = 1000
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields that were given in ``extra``."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class TextFormatter(logging.Formatter):
    """``2026-01-02T03:04:05.678Z INFO keeper: ready  place=default/host-tp0of1 bytes=123``, then a traceback if there
    is one, each of its lines set in: what an error quotes cannot begin a line that looks like a record.
    """

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        moment = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        source = record.name.removeprefix(f"{LOGGER}.").removeprefix("daemon.")
        line = f"{moment}.{int(record.msecs):03d}Z {record.levelname} {source}: {one_line(record.getMessage())}"
        if fields := fields_of(record):
            line += "  " + " ".join(f"{key}={_value(value)}" for key, value in fields.items())
        if record.exc_info:
            line += "".join(f"\n    {one_line(text)}" for text in self.formatException(record.exc_info).splitlines())
        return line


def _value(value: object) -> str:
    text = one_line(str(value).replace("\\", "\\\\"))
    if text and not any(character in ' "=' for character in text):
        return text
    return '"' + text.replace('"', '\\"') + '"'


class Damper(logging.Filter):
    """Lets so many records of one kind (logger and message) through in a second, from warnings on up. The first that
    comes through after that says in a field of its own, ``suppressed``, how many did not.
    """

    def __init__(self, *, per_s: int = COMPLAINTS_PER_S) -> None:
        super().__init__()
        self._per_s = per_s
        self._kinds: dict[tuple[str, object], _Second] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is let through."""
        if record.levelno < logging.WARNING:
            return True
        kind, now_s = (record.name, record.msg), time.monotonic()
        second = self._kinds.get(kind)
        if second is None or now_s - second.began_s >= 1:
            if len(self._kinds) >= _KINDS_MAX:
                self._kinds.clear()
            self._kinds[kind] = _Second(now_s)
            if second is not None and second.suppressed:
                record.suppressed = second.suppressed
            return True
        second.passed += 1
        second.suppressed += second.passed > self._per_s
        return second.passed <= self._per_s


@dataclass(slots=True)
class _Second:
    """Since a kind's first record of it."""

    began_s: float
    passed: int = 1
    suppressed: int = 0


class _AboveBars(logging.StreamHandler[TextIO]):
    """Writes lines above a progress bar, where there is one, instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        if "tqdm" not in sys.modules:  # no bar was ever shown
            super().emit(record)
            return
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def configure(*, format_name: str, level: str, place: str) -> None:
    """Send all records from ``level`` on to standard error, as ``text`` or ``json``. Called once, by a command.

    ``place`` is in every JSON record, so that several daemons can share one log.
    """
    handler = _AboveBars(sys.stderr)
    handler.addFilter(Damper())
    if format_name == "json":
        from pythonjsonlogger.json import JsonFormatter

        formatter: logging.Formatter = JsonFormatter(
            "%(levelname)s %(name)s %(message)s",
            rename_fields={"levelname": "level", "name": "logger"},
            timestamp="time",
            json_default=str,
            static_fields={"place": place},
        )
        handler.setFormatter(formatter)
    else:
        handler.setFormatter(TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
