"""Two generations' manifests: may the one take the place of the other, under tensors that stay what they are?

Owns the refusal. Pure.
"""

from __future__ import annotations

from weightcached.protocol.errors import SwapRefused
from weightcached.protocol.likeness import layout_differences
from weightcached.protocol.manifest import Manifest

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
