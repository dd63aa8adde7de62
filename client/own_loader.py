"""Attaching for an engine that has a loader of its own: where the contract allows the disk, that loader reads it.

Owns :func:`attach_or_none`, and what is said and counted where it gives none. The contract is ``attach.py``'s.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from weightcached.client.attach import Mode, attach
from weightcached.client.weights import WeightSet
from weightcached.protocol.errors import DaemonAbsent

logger = logging.getLogger("weightcached.client")


def attach_or_none(model: str | os.PathLike[str], *, mode: Mode = "client", **options: Any) -> WeightSet | None:
    """As :func:`weightcached.client.attach`, but ``None`` where that would load from disk.

    That is in mode ``off``, and in mode ``client`` when the place is absent, which is warned of and counted as there.
    """
    if mode == "off":
        return None
    try:
        return attach(model, mode="require" if mode == "client" else mode, **options)
    except DaemonAbsent as absent:
        if mode != "client":
            raise
        note_fallback(absent, model)
        return None


def note_fallback(absent: DaemonAbsent, model: str | os.PathLike[str]) -> None:
    """The warning and the counter of an engine that loads ``model`` itself, because its place is ``absent``."""
    from weightcached.client.counters import count_fallback

    socket_path = Path(str(absent.where))
    count_fallback(f"{socket_path.parent.name}/{socket_path.stem}")
    logger.warning("%s: the engine loads the weights of %s from disk itself", absent.found, model)
