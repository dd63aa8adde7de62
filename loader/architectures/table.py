"""What an architecture's table is: its rows, what it leaves out and why, and how it reads ``config.json``.

Pure. A new architecture is one new table in this folder, built from `rows.py`, and one line in the registry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weightcached.loader.architectures.blocks import Block
from weightcached.loader.architectures.ranks import Indivisible, Rank
from weightcached.loader.architectures.rows import Row, Vocabulary, Wanted
from weightcached.loader.architectures.shape import SIZES, ModelShape, Size, SizeRule
from weightcached.protocol.errors import ModelConfigError
from weightcached.protocol.text import shown

SIZES_TRIED = 1024


@dataclass(frozen=True, slots=True)
class Ignore:
    """Checkpoint tensors that are not loaded. ``*`` in ``pattern`` stands for one whole dotted component."""

    pattern: str
    reason: str
    switch: str | None = None
    """Only where this boolean of ``config.json`` is true."""

    def matching(self, names: Collection[str], model: ModelShape) -> Iterator[str]:
        if self.switch is None or model.switch(self.switch):
            yield from filter(self.matches, names)

    def matches(self, name: str) -> bool:
        mine, theirs = self.pattern.split("."), name.split(".")
        return len(mine) == len(theirs) and all(a in ("*", b) for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """Layers behind the last one, as many as ``key`` of ``config.json`` says, which no forward pass of the model uses.

    They predict more tokens at once (MTP); an engine loads them as a model of their own.
    """

    pattern: str
    """What stands before the layer's number."""
    count: Size
    key: str
    reason: str

    def matching(self, names: Collection[str], model: ModelShape) -> Iterator[str]:
        first = model.size(self.count)
        prefixes = tuple(f"{self.pattern}.{index}." for index in range(first, first + model.count(self.key)))
        yield from (name for name in names if name.startswith(prefixes))


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family's table, under the names that ``config.json`` may give it.

    Among pipeline stages, the rows before the layers stand on the first, those after them on the last, and an
    embedding that the head is tied to on both.
    """

    names: tuple[str, ...]
    rows: tuple[Row, ...]
    ignored: tuple[Ignore | DraftLayers, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What Transformers takes where ``config.json`` lacks a key."""
    sizes: Mapping[Size, SizeRule] = field(default_factory=dict)
    """How the sizes are read that not every model has, or has under other keys."""
    nested: str | None = None
    """The key of ``config.json`` under which another model that embeds this one keeps its config."""
    spellings: tuple[Mapping[str, str], ...] = ({},)
    """How files may spell names: beginnings of the rows' names, or, with a dot in front, endings, and what stands for
    them there. The first of which all occur counts; the last, if there is none."""
    spelling: Mapping[str, str] = field(default_factory=dict)
    """The one that counts."""
    has_stacks: bool = False
    """Whether the files have each layer's experts in one tensor."""
    ends_on_all_stages: bool = False
    """vLLM builds the embedding, the last norm and the head of this family on every stage, and wants them there."""

    def shape_of(self, config: Mapping[str, Any]) -> ModelShape:
        """The model's sizes. Raises ModelConfigError."""
        inner = config.get(self.nested, {}) if self.nested is not None else {}
        if not isinstance(inner, Mapping):
            raise ModelConfigError(f"config.json's {self.nested} is unusable", expected="an object", found=shown(inner))
        return ModelShape({**config, **inner}, {**SIZES, **self.sizes}, self.defaults, self.has_stacks)

    def spelled_in(self, names: Collection[str]) -> Architecture:
        """The same table for a checkpoint of these tensors. Below, what is said of tensors is in their spelling."""

        def occurs(spelling: Mapping[str, str]) -> bool:
            endings = [theirs for ours, theirs in spelling.items() if ours.startswith(".")]
            beginnings = [theirs for ours, theirs in spelling.items() if not ours.startswith(".")]
            return all(any(name.endswith(text) for name in names) for text in endings) and all(
                any(name.startswith(text) for name in names) for text in beginnings
            )

        spelling = next(filter(occurs, self.spellings), self.spellings[-1])
        has_stacks = "experts" in self.sizes and any(name.endswith(".experts.gate_up_proj") for name in names)
        return replace(self, spelling=spelling, has_stacks=has_stacks)

    def on_disk(self, name: str) -> str:
        """The files' spelling of a name of the rows'."""
        for ours, theirs in self.spelling.items():
            if ours.startswith("."):
                name = name.removesuffix(ours) + theirs if name.endswith(ours) else name
            elif name.startswith(ours):
                name = theirs + name.removeprefix(ours)
        return name

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        """The rank's parameters, in the layout's order. Raises Indivisible or TooMany."""
        for row, is_here in self._placed(model, rank):
            if is_here:
                yield from map(self._spelled, row.wanted(model, rank))

    def other_stages(self, model: ModelShape, rank: Rank) -> Iterator[str]:
        """The checkpoint tensors that only other pipeline stages load."""
        for row, is_here in self._placed(model, rank):
            if isinstance(row, Block):
                yield from map(self.on_disk, row.other_stages(model, rank))
            elif not is_here:
                yield from (self.on_disk(name) for wanted in row.wanted(model, rank) for name in wanted.sources())

    def excuses(self, names: Collection[str], model: ModelShape) -> dict[str, str]:
        """Those of ``names`` that no rank needs to load, each with the reason."""
        rules = [replace(rule, pattern=self.on_disk(rule.pattern)) for rule in self.ignored]
        return {name: rule.reason for rule in rules for name in rule.matching(names, model)}

    def blocks(self) -> tuple[Block, ...]:
        """The rows that repeat."""
        return tuple(row for row in self.rows if isinstance(row, Block))

    def possible_sizes(self, model: ModelShape, rank: Rank) -> tuple[int, ...]:
        """The TP sizes, up to `SIZES_TRIED`, that the model's shapes allow. They all divide the heads."""
        sizes = (size for size in range(1, SIZES_TRIED + 1) if model.size("heads") % size == 0)
        return tuple(size for size in sizes if self._allows(model, replace(rank, size=size, index=0)))

    def _spelled(self, wanted: Wanted) -> Wanted:
        if not self.spelling:
            return wanted
        parts = tuple(replace(part, source=self.on_disk(part.source)) for part in wanted.parts)
        return replace(wanted, parts=parts, elsewhere=tuple(map(self.on_disk, wanted.elsewhere)))

    def _placed(self, model: ModelShape, rank: Rank) -> Iterator[tuple[Row, bool]]:
        """Every row, and whether (or, of layers, that some of it) it is on the rank's stage."""
        tied = {row.tied_to for row in self.rows if isinstance(row, Vocabulary) and row.is_tied(model)}
        is_here = self.ends_on_all_stages or rank.is_first
        for row in self.rows:
            if isinstance(row, Block):
                is_here = self.ends_on_all_stages or rank.is_last
                yield row, True
            else:
                yield row, is_here or (rank.is_last and isinstance(row, Vocabulary) and row.name in tied)

    def _allows(self, model: ModelShape, rank: Rank) -> bool:
        try:
            for row in self.rows:
                if isinstance(row, Block):
                    row.require_shareable(model, rank)
                else:
                    for _ in row.wanted(model, rank):
                        pass
        except Indivisible:
            return False
        return True
