"""Accounting: which checkpoint tensors a layout expects, uses, ignores with a reason, and did not foresee.

Pure. Names here are checkpoint names, as the files spell them. The plan makes the account from headers alone and
refuses to go on unless it balances; the manifest carries it, so that an engine can see what became of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightcached.protocol.errors import MissingTensor, UnexpectedTensor

NAMES_SHOWN = 10
"""How many names an error lists before it only counts the rest."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Four sets of checkpoint names. ``loaded`` ⊆ ``expected``; the files' names = loaded + ignored + unexpected."""

    expected: frozenset[str]
    loaded: frozenset[str]
    ignored: Mapping[str, str]
    """Name → why it is not needed."""
    unexpected: frozenset[str]

    @property
    def missing(self) -> frozenset[str]:
        """What the layout expects and no file has."""
        return self.expected - self.loaded

    @property
    def balanced(self) -> bool:
        return not self.missing and not self.unexpected

    def require_balance(self, *, where: object = None, hint: str | None = None) -> None:
        """Raise MissingTensor or UnexpectedTensor unless all names are accounted for. ``hint`` is the next step."""
        missing, unexpected = self.missing, self.unexpected
        if missing:
            raise MissingTensor(
                f"{len(missing)} of {len(self.expected)} expected tensors are in no file",
                expected=shown(missing),
                found=f"unexpected instead: {shown(unexpected)}" if unexpected else None,
                where=where,
                next_step=hint,
            )
        if unexpected:
            raise UnexpectedTensor(
                f"{len(unexpected)} tensors are neither used nor known to be superfluous",
                found=shown(unexpected),
                where=where,
                next_step=hint,
            )


def account(*, expected: Iterable[str], present: Iterable[str], ignored: Mapping[str, str]) -> Accounting:
    """The account of files that hold the names ``present``. A name both expected and ignored is expected."""
    wanted, names = frozenset(expected), frozenset(present)
    excused = {name: reason for name, reason in ignored.items() if name in names and name not in wanted}
    return Accounting(
        expected=wanted,
        loaded=wanted & names,
        ignored=excused,
        unexpected=names - wanted - excused.keys(),
    )


def shown(names: Iterable[str]) -> str:
    """The first few names in order, and how many more there are."""
    ordered = sorted(names)
    text = ", ".join(ordered[:NAMES_SHOWN])
    rest = len(ordered) - NAMES_SHOWN
    return f"{text} and {rest} more" if rest > 0 else text
