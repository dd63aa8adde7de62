"""Words, numbers and tables for people: what came from somebody else made safe to show, the rest short. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def one_line(text: str) -> str:
    """Control characters, which a peer's words or a file's name may hold, cannot start a line or move a cursor."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def shown(value: object) -> str:
    """A value from a file, for a message: quoted, so that it plays no tricks on a terminal, and short."""
    text = ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"


def folded(name: str) -> str:
    """A dotted name with ``*`` for each component that is a number: one word for the same thing in every layer."""
    return ".".join("*" if component.isdecimal() else component for component in name.split("."))


def binary_size(nbytes: float) -> str:
    """``0 B``, ``12.3 MiB``: three digits or so, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def duration(seconds: float) -> str:
    """``5s``, ``12m``, ``3h``, ``8d``: the largest unit that fits, whole."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size_s:
            return f"{seconds // size_s:.0f}{unit}"
    return f"{seconds:.0f}s"
