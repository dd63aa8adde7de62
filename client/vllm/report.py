"""What the start of an engine did, for its log and for whoever measures: one line, one value.

Owns :class:`LoadReport`; the loader makes it and leaves it on the model as ``model.weightcached``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weightcached.protocol.text import binary_size


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """One rank's start. ``seconds`` are by stage, in their order."""

    source: Literal["daemon", "disk"]
    """``disk``: vLLM's own loader, in mode ``off`` or because no daemon's socket was there."""
    place: str
    version: str | None = None
    generation: str | None = None
    nbytes_shared: int = 0
    """Of parameters that lie in mapped memory."""
    nbytes_private: int = 0
    """By how much the process's own memory (RssAnon) has grown."""
    made_anew: Mapping[str, int] = field(default_factory=dict)
    """Weights that post-processing has brought into another form, in private memory: name, with ``*`` for numbers, to
    bytes before."""
    seconds: Mapping[str, float]

    def log(self, logger: logging.Logger) -> None:
        """One line, and a warning where more than a hundredth of the weights is not shared."""
        logger.info("%s", self.line())
        if sum(self.made_anew.values()) * 100 > self.nbytes_shared:
            logger.warning(
                "post-processing has made weights anew, which every engine has of its own: %s",
                ", ".join(f"{name} ({binary_size(nbytes)})" for name, nbytes in self.made_anew.items()),
            )

    def line(self) -> str:
        """``weights of /run/weightcached/default/host-tp0of1.sock: source daemon, version …``"""
        seconds = ", ".join(f"{stage} {value:.3f}" for stage, value in self.seconds.items())
        anew = sum(self.made_anew.values())
        return (
            f"weights of {self.place}: source {self.source}, version {self.version or 'unknown'}, "
            f"{binary_size(self.nbytes_shared)} shared, "
            f"{binary_size(self.nbytes_private)} more of this process's own memory"
            f"{f' ({binary_size(anew)} of weights made anew)' if anew else ''}; seconds: {seconds}"
        )


def own_memory_nbytes() -> int:
    """This process's own memory (RssAnon), in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        line = next(line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024
