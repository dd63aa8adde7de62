"""One error: an invariant does not hold. Everything in this package raises it, and only the runner catches it."""

from __future__ import annotations


class Broken(Exception):
    """``invariant`` is one word, the same in tests and reports; ``detail`` says what was expected and found."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail
