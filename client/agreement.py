"""Do all ranks of one engine have the same weights? Said before the first of them computes, and before they switch.

Owns :class:`Standing` (what one rank says), how it travels, and the judgement, which is pure: same source, and the same
version. Versions of one content are two while daemons are learning its digest, one after the other; then the version by
receipts decides (both are in every grant). How words come from rank to rank is the engine's: ``vllm/together.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgpack

from weightcached.protocol.errors import RanksDisagree
from weightcached.protocol.frozen import Frozen
from weightcached.protocol.text import table

SLOT_NBYTES = 8192
"""Room for one rank's words: a length of four bytes, then msgpack."""
_ERROR_MAX_CHARACTERS = 1000


class Standing(Frozen):
    """What one rank has. Versions and generation are None where the weights are not a daemon's."""

    rank: str
    """The device word of its place."""
    place: str
    source: Literal["daemon", "disk", "nothing"]
    """``disk``: no daemon's socket is there, and vLLM's own loader may be used."""
    version: str | None = None
    receipts_version: str | None = None
    generation: str | None = None
    error: str | None = None
    """Why it has nothing."""

    def row(self) -> tuple[str, ...]:
        return (self.rank, self.source, self.version or "-", self.generation or "-", self.place, self.error or "")


def packed(standing: Standing) -> bytes:
    """The content of one slot."""
    fields = standing.model_dump()
    if standing.error is not None:
        fields["error"] = standing.error.encode("ascii", "backslashreplace").decode()[:_ERROR_MAX_CHARACTERS]
    body: bytes = msgpack.packb(fields)
    return (len(body).to_bytes(4, "little") + body).ljust(SLOT_NBYTES, b"\0")


def unpacked(slot: bytes) -> Standing:
    """What :func:`packed` was given. Raises ValueError for anything else."""
    nbytes = int.from_bytes(slot[:4], "little")
    if nbytes > len(slot) - 4:
        raise ValueError("a rank sent a slot that cannot be")
    return Standing.model_validate(msgpack.unpackb(slot[4 : 4 + nbytes]))


def agree(standings: Sequence[Standing]) -> bool:
    """Whether all have the same of the same."""
    if {standing.source for standing in standings} not in ({"daemon"}, {"disk"}):
        return False
    versions = {standing.version for standing in standings}
    receipts_versions = {standing.receipts_version for standing in standings}
    return len(versions) == 1 or len(receipts_versions) == 1


def require_agreement(standings: Sequence[Standing]) -> None:
    """Raises RanksDisagree with the table of who has what, unless they :func:`agree`."""
    if not agree(standings):
        raise RanksDisagree(
            "the ranks of this engine do not have the same weights",
            expected="one version on all ranks, from daemons, or no daemon's socket for any of them",
            found=" | ".join(" ".join(filter(None, one.row())) for one in standings),
            next_step="start a daemon for each rank, of the same checkpoint (`weightcached up`, `weightcached status` "
            "shows them), and then the engine again",
        )


def table_of(standings: Sequence[Standing]) -> list[str]:
    """Who has what, a line for each rank under a heading."""
    return table([("rank", "source", "version", "generation", "place", "error"), *(one.row() for one in standings)])
