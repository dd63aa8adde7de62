"""Warns when the daemon's weights come from another snapshot or with another tokenizer than the engine's. Refuses
nothing.

Called by ``attach.py`` once weights are granted. Tokenizer files can be tens of megabytes, so their digest is
remembered in this process under their stat evidence: a wrong answer would cost one log line.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from weightcached.protocol.config import Provenance, provenance_of
from weightcached.protocol.text import one_line

logger = logging.getLogger("weightcached.client")


def ours(model_dir: Path) -> Provenance | None:
    """What is here to compare with. None, and a warning, where it cannot be looked at."""
    try:
        return _remembered(model_dir, _stamp(model_dir))
    except OSError as error:
        logger.warning("the tokenizer in %s cannot be compared with the daemon's: %s", model_dir, error)
        return None


def compare(mine: Provenance | None, theirs: Provenance, *, where: str) -> None:
    """Log what differs between the daemon's provenance and ours: a warning, or for host and path an information."""
    if mine is None:
        return
    for what, our, their in (
        ("tokenizer", mine.tokenizer_sha256, theirs.tokenizer_sha256),
        ("revision", mine.revision, theirs.revision),
    ):
        if our != their:
            logger.warning(
                "the daemon at %s has the same weights with another %s: daemon %s, engine %s",
                where,
                what,
                one_line(str(their)),
                our,
            )
    if (mine.host, mine.path) != (theirs.host, theirs.path):
        logger.info("the daemon at %s loaded %s", where, one_line(f"{theirs.path} on {theirs.host}"))


@functools.lru_cache(maxsize=8)
def _remembered(model_dir: Path, stamp: tuple[tuple[str, int, int, int], ...]) -> Provenance:
    return provenance_of(model_dir)


def _stamp(model_dir: Path) -> tuple[tuple[str, int, int, int], ...]:
    """(name, inode, size, ctime) of all small files there are: which of them are a tokenizer's is not decided here.

    Of links, the link's own: a hub cache's never change what they point to, and may point to nothing."""
    with os.scandir(model_dir) as entries:
        names = [entry for entry in entries if not entry.name.endswith(".safetensors")]
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in names]
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in found))
