"""The rows that architecture tables are made of, and the arithmetic of each: what a rank keeps of which tensor.

Pure: sizes and a rank in, `Wanted` parameters out; no headers, no files. A row knows how its parameters are shared
among tensor-parallel (TP) ranks. Notation as in the field: T ranks, rank r, H query heads, K key/value heads, d head
size. A size that T does not divide raises `Indivisible`; nothing is ever rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from weightcached.loader.architectures.ranks import Indivisible, Rank
from weightcached.loader.architectures.shape import ModelShape, Size
from weightcached.loader.boxes import Box, Shape, whole
from weightcached.loader.planned import PartKind

VOCABULARY_MULTIPLE = 64
"""Vocabularies are padded to a multiple of this, whatever T is."""

Switch = str | bool
"""Whether a bias exists: always, never, or as a boolean of ``config.json`` says."""


@dataclass(frozen=True, slots=True)
class Part:
    """``box`` of the checkpoint tensor ``source`` (of this ``shape``) goes to the parameter's ``destination``."""

    source: str
    shape: Shape
    box: Box
    destination: Box
    transposed: bool = False
    """The last two axes of the box are swapped first."""
    same_as: tuple[Shape, ...] = ()
    """Other shapes that the file may give it: the same elements in C order."""
    layers: int = 1
    """How many layers, fused side by side in the file as here, the box has rows of."""

    def under(self, prefix: str) -> Part:
        """The same of a tensor under ``prefix``. Spelt out, every field: ``replace`` takes three times as long."""
        return Part(
            prefix + self.source, self.shape, self.box, self.destination, self.transposed, self.same_as, self.layers
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A parameter of one rank, before headers are looked at."""

    name: str
    shape: Shape
    part_kind: PartKind
    parts: tuple[Part, ...] = ()
    zeros: tuple[Box, ...] = ()
    linear: bool = False
    """A weight ``[out, in]`` of a linear layer, which an online quantizer may take."""
    alias_of: str | None = None
    dtype: str | None = None
    """As stored: floating point is cast to it, anything else must have it in the file. ``None``: the model's own."""
    elsewhere: tuple[str, ...] = ()
    """Checkpoint tensors of its kind that only other expert-parallel ranks load."""
    finite: bool = False
    """A value that is not finite is refused: scales."""

    def under(self, prefix: str) -> Wanted:
        """The same parameter under ``prefix``, with everything that it is made from. Every field, as in ``Part``."""
        return Wanted(
            prefix + self.name,
            self.shape,
            self.part_kind,
            tuple([part.under(prefix) for part in self.parts]),
            self.zeros,
            self.linear,
            None if self.alias_of is None else prefix + self.alias_of,
            self.dtype,
            tuple([prefix + name for name in self.elsewhere]),
            self.finite,
        )

    def sources(self) -> Iterator[str]:
        """Every checkpoint tensor that some rank makes its like from."""
        yield from (part.source for part in self.parts)
        yield from self.elsewhere


class Row(Protocol):
    """One row of a table."""

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        """This rank's parameters, in the layout's order."""
        ...


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same tensor on every rank: norms, and whatever is too small to cut."""

    name: str
    sizes: tuple[Size | int, ...]
    source: str | None = None
    """The checkpoint's name for it, where that is another."""
    dtype: str | None = None
    """The dtype it always has, whatever is asked for."""

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        shape = tuple(size if isinstance(size, int) else model.size(size) for size in self.sizes)
        part = Part(self.source or self.name, shape, whole(shape), whole(shape))
        yield Wanted(self.name, shape, "replicated", (part,), dtype=self.dtype)


def layer_norm(name: str) -> tuple[Row, Row]:
    """A norm over the hidden size that has a bias beside its weight."""
    return Replicated(f"{name}.weight", ("hidden",)), Replicated(f"{name}.bias", ("hidden",))


@dataclass(frozen=True, slots=True)
class PerHead:
    """A vector with one element for each query head, cut like the heads."""

    name: str
    source: str

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        heads = model.size("heads")
        kept = rank.share(heads, f"{heads} query heads")
        part = Part(self.source, (heads,), Box((rank.index * kept,), (kept,)), whole((kept,)))
        yield Wanted(self.name, (kept,), "column", (part,))


@dataclass(frozen=True, slots=True)
class Column:
    """Linear layers cut by output rows, each of ``parts`` on its own, then stacked: this rank's gate above its up.

    One part, ``name`` itself, is a plain column-parallel layer. Parts of one name are stacked in the file already.
    """

    name: str
    parts: tuple[str, ...]
    outputs: Size
    inputs: Size
    bias: Switch = False
    transposed: bool = False
    """The file has ``[in, out]``."""

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        total = model.size(self.outputs)
        share = rank.share(total, f"{self.outputs} size {total}")
        ranges = [RowRange(part, total, rank.index * share, share) for part in self.parts]
        yield from stacked(
            self.name,
            ranges,
            model.size(self.inputs),
            bias=_is_on(self.bias, model),
            transposed=self.transposed,
        )


@dataclass(frozen=True, slots=True)
class RowParallel:
    """A linear layer cut by input columns. Its bias is a full copy on every rank: the engine adds it once."""

    name: str
    outputs: Size
    inputs: Size
    bias: Switch = False
    source: str | None = None
    """The checkpoint's name for it, where that is another."""
    transposed: bool = False
    """The file has ``[in, out]``."""

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        source, outputs, inputs = self.source or self.name, model.size(self.outputs), model.size(self.inputs)
        share = rank.share(inputs, f"{self.inputs} size {inputs}")
        kept, local = Box((0, rank.index * share), (outputs, share)), (outputs, share)
        part = _weight(f"{source}.weight", (outputs, inputs), kept, whole(local), transposed=self.transposed)
        yield Wanted(f"{self.name}.weight", local, "row", (part,), linear=True)
        if _is_on(self.bias, model):
            full = Part(f"{source}.bias", (outputs,), whole((outputs,)), whole((outputs,)))
            yield Wanted(f"{self.name}.bias", (outputs,), "replicated", (full,))


@dataclass(frozen=True, slots=True)
class Qkv:
    """Query, key and value projections stacked, cut by heads. Where T > K, each key/value head is on T/K ranks.

    Those of one name are stacked in the file already.
    """

    name: str
    query: str
    key: str
    value: str
    inputs: Size
    bias: Switch = False
    transposed: bool = False
    """The file has ``[in, out]``."""

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        heads, kv_heads, head = model.size("heads"), model.size("kv_heads"), model.size("head")
        query_rows = rank.share(heads, f"{heads} query heads") * head
        first_kv_head, kept_kv_heads = _kv_heads(kv_heads, rank)
        kv = (kv_heads * head, first_kv_head * head, kept_kv_heads * head)
        ranges = [
            RowRange(self.query, heads * head, rank.index * query_rows, query_rows),
            RowRange(self.key, *kv),
            RowRange(self.value, *kv),
        ]
        yield from stacked(
            self.name,
            ranges,
            model.size(self.inputs),
            bias=_is_on(self.bias, model),
            transposed=self.transposed,
        )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """An embedding or a head ``[rows, hidden]`` cut by rows, the vocabulary padded first; padding rows are zeros.

    With ``tied_to`` it is another name of that one where ``config.json`` ties them (``tie_word_embeddings``).
    """

    name: str
    tied_to: str | None = None
    source: str | None = None
    """The checkpoint's name for it, where that is another."""
    rows: Size = "vocabulary"

    def is_tied(self, model: ModelShape) -> bool:
        return self.tied_to is not None and model.switch("tie_word_embeddings")

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        vocabulary, hidden = model.size(self.rows), model.size("hidden")
        padded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        rows = rank.share(padded, f"a {self.rows.replace('_', ' ')} of {vocabulary}, padded to {padded},")
        name, shape = f"{self.name}.weight", (rows, hidden)
        if self.is_tied(model):
            yield Wanted(name, shape, "vocabulary", alias_of=f"{self.tied_to}.weight")
            return
        start = min(rank.index * rows, vocabulary)
        kept = min(start + rows, vocabulary) - start
        source = f"{self.source or self.name}.weight"
        part = Part(source, (vocabulary, hidden), Box((start, 0), (kept, hidden)), Box((0, 0), (kept, hidden)))
        padding = Box((kept, 0), (rows - kept, hidden))
        yield Wanted(name, shape, "vocabulary", (part,), (padding,) if padding.volume else ())


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows ``start .. start + count`` of the ``total`` rows of the layer ``source``."""

    source: str
    total: int
    start: int
    count: int
    layers: int = 1
    """How many layers' rows these are."""


def stacked(
    name: str,
    ranges: Iterable[RowRange],
    inputs: int,
    *,
    bias: bool = False,
    part_kind: PartKind = "column",
    transposed: bool = False,
) -> Iterator[Wanted]:
    """The linear layer whose rows are the ranges, one below the other, and its bias.

    Ranges of one source are of layers that are stacked whole in that tensor, in this order.
    """
    weights, biases, filled = [], [], 0
    for rows in _joined(_in_their_sources(list(ranges))):
        kept, place = Box((rows.start, 0), (rows.count, inputs)), Box((filled, 0), (rows.count, inputs))
        weight = _weight(f"{rows.source}.weight", (rows.total, inputs), kept, place, transposed=transposed)
        weights.append(replace(weight, layers=rows.layers) if rows.layers > 1 else weight)
        biases.append(
            Part(f"{rows.source}.bias", (rows.total,), Box((rows.start,), (rows.count,)), Box((filled,), (rows.count,)))
        )
        filled += rows.count
    yield Wanted(f"{name}.weight", (filled, inputs), part_kind, tuple(weights), linear=True)
    if bias:
        yield Wanted(f"{name}.bias", (filled,), part_kind, tuple(biases))


def _weight(source: str, shape: Shape, box: Box, destination: Box, *, transposed: bool) -> Part:
    """The part of a linear weight that is ``[out, in]`` here; in the file, too, unless it is ``transposed``."""
    if transposed:
        return Part(source, shape[::-1], box.swapped, destination, transposed=True)
    return Part(source, shape, box, destination)


def _in_their_sources(ranges: list[RowRange]) -> Iterator[RowRange]:
    """The ranges of layers as ranges of the tensors that the layers are stacked in."""
    totals: dict[str, int] = {}
    for rows in ranges:
        totals[rows.source] = totals.get(rows.source, 0) + rows.total
    above = dict.fromkeys(totals, 0)
    for rows in ranges:
        yield replace(rows, total=totals[rows.source], start=above[rows.source] + rows.start)
        above[rows.source] += rows.total


def _joined(ranges: Iterable[RowRange]) -> Iterator[RowRange]:
    """The same rows; where one range goes on where the last ended, they are one: so a file is read once, not thrice."""
    last = None
    for rows in ranges:
        if last is not None and (last.source, last.start + last.count) == (rows.source, rows.start):
            last = replace(last, count=last.count + rows.count, layers=last.layers + rows.layers)
            continue
        if last is not None:
            yield last
        last = rows
    if last is not None:
        yield last


def _kv_heads(kv_heads: int, rank: Rank) -> tuple[int, int]:
    """(first, count) of the key/value heads on this rank. Raises Indivisible."""
    if rank.size < kv_heads:
        count = rank.share(kv_heads, f"{kv_heads} key/value heads")
        return rank.index * count, count
    if rank.size % kv_heads:
        raise Indivisible(f"{kv_heads} key/value heads")
    return rank.index // (rank.size // kv_heads), 1


def _is_on(switch: Switch, model: ModelShape) -> bool:
    return switch if isinstance(switch, bool) else model.switch(switch)
