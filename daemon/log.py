"""Structured logs on standard error: one record is one line, as readable text or as JSON.

Owns the two formats. Everybody logs with the standard library: a short message that does not vary, and what varies as
fields in ``extra=``. Field names must not be attributes of ``logging.LogRecord`` (``name``, ``args``, …).
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from weightcached.daemon.text import one_line

LOGGER = "weightcached"
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
