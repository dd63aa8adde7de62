"""Words that came from somebody else, made safe to show: in a message, a log line, a table on a terminal. Pure."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Control characters, which a peer's words or a file's name may hold, cannot start a line or move a cursor."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def shown(value: object) -> str:
    """A value from a file, for a message: quoted, so that it plays no tricks on a terminal, and short."""
    text = ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"
