"""Which boxes have been pushed: each needed element once, none twice, nothing that is not needed.

Pure book-keeping, for one thread. A piece has to lie within one of the tensor's boxes; pieces of a box are disjoint,
so a box is whole when their volumes add up to its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weightcached.loader.accounting import shown as shown_names
from weightcached.loader.boxes import Box, intersects, is_inside
from weightcached.loader.pushed.wanted import Pushable
from weightcached.protocol.errors import PushMismatch
from weightcached.protocol.text import shown

PIECES_OF_A_BOX_MAX = 4096


class Ledger:
    """Of one push of ``table``'s tensors."""

    def __init__(self, table: Sequence[Pushable]) -> None:
        self._table = table
        self._pieces: dict[tuple[int, int], list[Box]] = {}
        """(tensor, box) → pieces that came."""
        self._left: dict[int, int] = {}
        """Tensor that was begun → elements of its boxes that have not come."""
        self.pieces = 0

    def take(self, number: int, piece: Box) -> Pushable:
        """A piece of tensor ``number`` has come. Raises PushMismatch where it is none that can come."""
        if number >= len(self._table):
            raise PushMismatch("a piece is of no tensor", expected=f"a number below {len(self._table)}", found=number)
        one = self._table[number]
        at = next((at for at, box in enumerate(one.boxes) if piece.volume and _within(piece, box)), None)
        if at is None:
            raise PushMismatch(
                f"a piece of {shown(one.name)} is not inside what this rank needs of it",
                expected=f"a part of {', '.join(map(_words, one.boxes)) or 'nothing'}",
                found=_words(piece),
                next_step="push what `boxes` says",
            )
        came = self._pieces.setdefault((number, at), [])
        for other in came:
            if intersects(other, piece):
                raise PushMismatch(
                    f"a part of {shown(one.name)} was pushed twice",
                    expected="every element once",
                    found=f"{_words(piece)} after {_words(other)}",
                )
        if len(came) == PIECES_OF_A_BOX_MAX:
            raise PushMismatch(
                f"{shown(one.name)} comes in too small pieces",
                expected=f"at most {PIECES_OF_A_BOX_MAX} pieces of {_words(one.boxes[at])}",
            )
        came.append(piece)
        left = self._left.setdefault(number, sum(box.volume for box in one.boxes))
        self._left[number] = left - piece.volume
        self.pieces += 1
        return one

    @property
    def names_begun(self) -> frozenset[str]:
        """Tensors of which anything has come."""
        return frozenset(self._table[number].name for number in self._left)

    def require_whole(self, *, partial: bool) -> None:
        """Raises PushMismatch naming the tensors of which something is missing; with ``partial``, of those only that
        were begun.
        """
        torn = sorted(self._table[number].name for number, left in self._left.items() if left)
        if torn:
            raise PushMismatch(
                f"{len(torn)} tensors were pushed in part",
                expected="every box of a tensor, whole",
                found=shown_names(torn),
                next_step="push the rest of them, or nothing of them",
            )
        missing = [] if partial else list(self._missing())
        if missing:
            raise PushMismatch(
                f"{len(missing)} of {sum(bool(one.boxes) for one in self._table)} tensors were not pushed",
                expected="all that this rank needs",
                found=f"missing: {shown_names(missing)}",
                next_step="push them, or keep what is served of them with partial=True",
            )

    def _missing(self) -> Iterator[str]:
        return (one.name for number, one in enumerate(self._table) if one.boxes and number not in self._left)


def _within(piece: Box, box: Box) -> bool:
    if len(piece.start) != len(box.start):
        return False
    return is_inside(Box(tuple(a - b for a, b in zip(piece.start, box.start, strict=True)), piece.shape), box.shape)


def _words(box: Box) -> str:
    ranges = (f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True))
    return f"[{', '.join(ranges)}]"
