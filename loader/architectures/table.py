"""What an architecture's table is: its rows, what it leaves out and why, and how it reads ``config.json``.

Pure. A new architecture is one new table in this folder, built from `rows.py`, and one line in the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from weightcached.loader.architectures.rows import Block, Indivisible, Rank, Row, Wanted
from weightcached.loader.architectures.shape import ModelShape, shape_of

SIZES_TRIED = 1024


@dataclass(frozen=True, slots=True)
class Ignore:
    """Checkpoint tensors that are not loaded. ``*`` in ``pattern`` stands for one whole dotted component."""

    pattern: str
    reason: str
    switch: str | None = None
    """Only where this boolean of ``config.json`` is true."""

    def matches(self, name: str) -> bool:
        mine, theirs = self.pattern.split("."), name.split(".")
        return len(mine) == len(theirs) and all(a in ("*", b) for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family's table, under the names that ``config.json`` may give it."""

    names: tuple[str, ...]
    rows: tuple[Row, ...]
    ignored: tuple[Ignore, ...] = ()
    defaults: Mapping[str, int] = field(default_factory=dict)
    """What Transformers takes where ``config.json`` lacks a key."""

    def shape_of(self, config: Mapping[str, Any]) -> ModelShape:
        """The model's sizes. Raises ModelConfigError."""
        return shape_of(config, self.defaults)

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        """The rank's parameters, in the layout's order. Raises Indivisible."""
        for row in self.rows:
            yield from row.wanted(model, rank)

    def excuses(self, names: Iterable[str], model: ModelShape) -> dict[str, str]:
        """Those of ``names`` that need not be loaded, each with the reason."""
        rules = [rule for rule in self.ignored if rule.switch is None or model.switch(rule.switch)]
        return {name: rule.reason for name in names for rule in rules if rule.matches(name)}

    def blocks(self) -> tuple[Block, ...]:
        """The rows that repeat."""
        return tuple(row for row in self.rows if isinstance(row, Block))

    def possible_sizes(self, model: ModelShape) -> tuple[int, ...]:
        """The TP sizes, up to `SIZES_TRIED`, that the model's shapes allow. They all divide the heads."""
        return tuple(size for size in range(1, SIZES_TRIED + 1) if self._allows(model, size))

    def _allows(self, model: ModelShape, size: int) -> bool:
        if model.size("heads") % size:
            return False
        one_layer = ModelShape({**model.sizes, "layers": 1}, model.config)
        try:
            for _ in self.wanted(one_layer, Rank(size, 0)):
                pass
        except Indivisible:
            return False
        return True
