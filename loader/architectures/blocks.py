"""Layers: rows that stand once for each of a model's layers, or for some of them.

Pure. Which layers a rank has, and what its layers leave to other ranks, is decided here; the rows know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from weightcached.loader.architectures.ranks import Rank
from weightcached.loader.architectures.rows import Row, Wanted
from weightcached.loader.architectures.shape import ModelShape, Size

LayerRule = Callable[[ModelShape, int], bool]
"""Whether the layer of this index has something, as ``config.json`` says."""


@dataclass(frozen=True, slots=True)
class Where:
    """Rows that only some layers have: those that ``rule`` holds for."""

    rule: LayerRule
    rows: tuple[Row | Where, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that stand once for each of ``count`` layers, their names under ``prefix.<index>.``."""

    prefix: str
    count: Size
    rows: tuple[Row | Where, ...]

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        """The parameters of the layers on this rank's stage."""
        for index, templates in self._layers(model, rank, rank.layers(model.size(self.count))):
            under = f"{self.prefix}.{index}."
            for template in templates:
                yield template.under(under)

    def other_stages(self, model: ModelShape, rank: Rank) -> Iterator[str]:
        """The checkpoint tensors of the layers that are on other stages."""
        count = model.size(self.count)
        here = rank.layers(count)
        for index, templates in self._layers(model, rank, (index for index in range(count) if index not in here)):
            under = f"{self.prefix}.{index}."
            for template in templates:
                yield from (under + name for name in template.sources())

    def require_shareable(self, model: ModelShape, rank: Rank) -> None:
        """Raise Indivisible or TooMany where some layer of the model cannot be shared; cheaper than `wanted`."""
        for _ in self._layers(model, rank, range(model.size(self.count))):
            pass

    def _layers(
        self, model: ModelShape, rank: Rank, indices: Iterable[int]
    ) -> Iterator[tuple[int, tuple[Wanted, ...]]]:
        """Each layer's parameters, not yet under its prefix. The arithmetic of equal layers is done once."""
        rows = list(_flat(self.rows, ()))
        made: dict[tuple[bool, ...], tuple[Wanted, ...]] = {}
        for index in indices:
            held = tuple(all(rule(model, index) for rule in rules) for rules, _ in rows)
            if held not in made:
                there = [row for has, (_, row) in zip(held, rows, strict=True) if has]
                made[held] = tuple(wanted for row in there for wanted in row.wanted(model, rank))
            yield index, made[held]


def _flat(rows: Iterable[Row | Where], rules: tuple[LayerRule, ...]) -> Iterator[tuple[tuple[LayerRule, ...], Row]]:
    for row in rows:
        if isinstance(row, Where):
            yield from _flat(row.rows, (*rules, row.rule))
        else:
            yield rules, row
