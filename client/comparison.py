"""Two generations' manifests: may the one take the place of the other, under tensors that stay what they are?

Owns what has to be equal for that. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from weightcached.protocol.config import explain_differences
from weightcached.protocol.errors import SwapRefused
from weightcached.protocol.manifest import Manifest, Row

NAMES_SHOWN = 8


def require_same_layout(ours: Manifest, theirs: Manifest, *, where: object) -> None:
    """Raises SwapRefused, naming the first few differences and how many there are, unless every row of ``theirs`` has
    the name, place, form, kind and alias of one of ``ours``, made with the same config.
    """
    differences = list(layout_differences(ours, theirs))
    if differences:
        more = f"; and {len(differences) - NAMES_SHOWN} more" if len(differences) > NAMES_SHOWN else ""
        raise SwapRefused(
            f"generation {theirs.meta.generation} cannot take the place of {ours.meta.generation}: "
            f"{len(differences)} differences of layout",
            expected="the same parameters at the same places, of the same config",
            found="; ".join(differences[:NAMES_SHOWN]) + more,
            where=where,
            next_step="start the engine again to use it",
        )


def layout_differences(ours: Manifest, theirs: Manifest) -> Iterator[str]:
    """What differs, in words. Raises TransferError for a row that lies."""
    if ours.meta.fingerprint != theirs.meta.fingerprint:
        for field in explain_differences(theirs.meta.config, ours.meta.config):
            yield f"config {field.field}: {field.client!r} here, {field.daemon!r} there"
    if ours.meta.segments_nbytes != theirs.meta.segments_nbytes:
        yield f"segments of {ours.meta.segments_nbytes} bytes here, {theirs.meta.segments_nbytes} there"
    ours_only, theirs_only = ours.meta.scalars, theirs.meta.scalars
    for name in sorted(ours_only.keys() | theirs_only.keys()):
        if name not in ours_only or name not in theirs_only or ours_only[name] != theirs_only[name]:
            yield f"scalar {name}: {ours_only.get(name, 'none')!r} here, {theirs_only.get(name, 'none')!r} there"
    for row in ours:
        if row.name not in theirs:
            yield f"{row.name}: not there"
        elif difference := _difference(row, theirs.row(row.name)):
            yield f"{row.name}: {difference}"
    for name in theirs.names:
        if name not in ours:
            yield f"{name}: not here"


def _difference(ours: Row, theirs: Row) -> str:
    pairs = (
        (what, getattr(ours, what), getattr(theirs, what))
        for what in ("dtype", "shape", "stride", "segment", "offset", "kind", "persistent", "alias_of")
    )
    return ", ".join(f"{what} {here} here, {there} there" for what, here, there in pairs if here != there)
