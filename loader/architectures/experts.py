"""Mixtures of experts: the rows that stack a layer's experts, and which layers have some.

A rank holds either its slice of every expert (tensor parallel) or all of some experts (expert parallel). ``w13`` is
``[local experts, 2 × intermediate, hidden]`` with gate above up, and ``w2`` ``[local experts, hidden, intermediate]``:
as engines have them after loading and before their kernels repack anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weightcached.loader.architectures.blocks import LayerRule
from weightcached.loader.architectures.ranks import Rank
from weightcached.loader.architectures.rows import Part, Wanted
from weightcached.loader.architectures.shape import ModelShape
from weightcached.loader.boxes import Box, Shape
from weightcached.loader.planned import PartKind
from weightcached.protocol.errors import ModelConfigError
from weightcached.protocol.text import shown


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated experts with a tensor for each projection of each: ``source.<expert>.<gate, up or down>.weight``.

    Or, where the files have them so, with two for all: ``source.gate_up_proj`` ``[experts, 2 × intermediate, hidden]``,
    gate above up, and ``source.down_proj`` ``[experts, hidden, intermediate]``.
    """

    name: str
    source: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        return self._of_stacks(model, rank) if model.has_stacks else self._of_each(model, rank)

    def _of_each(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        count, hidden, inner = model.size("experts"), model.size("hidden"), model.size("expert_intermediate")
        here, share, start = rank.experts(count), *_inner_share(inner, rank)
        rows, columns = Box((start, 0), (share, hidden)), Box((0, start), (hidden, share))
        w13, w2 = [], []
        for local, expert in enumerate(here):
            at = f"{self.source}.{expert}"
            for half, projection in enumerate((self.gate, self.up)):
                place = Box((local, half * share, 0), (1, share, hidden))
                w13.append(Part(f"{at}.{projection}.weight", (inner, hidden), rows, place))
            place = Box((local, 0, 0), (1, hidden, share))
            w2.append(Part(f"{at}.{self.down}.weight", (hidden, inner), columns, place))
        others = [f"{self.source}.{expert}" for expert in range(count) if expert not in here]
        yield Wanted(
            f"{self.name}.w13_weight",
            (len(here), 2 * share, hidden),
            _kind("column", rank),
            tuple(w13),
            linear=True,
            elsewhere=tuple(f"{at}.{projection}.weight" for at in others for projection in (self.gate, self.up)),
        )
        yield Wanted(
            f"{self.name}.w2_weight",
            (len(here), hidden, share),
            _kind("row", rank),
            tuple(w2),
            linear=True,
            elsewhere=tuple(f"{at}.{self.down}.weight" for at in others),
        )

    def _of_stacks(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        count, hidden, inner = model.size("experts"), model.size("hidden"), model.size("expert_intermediate")
        here, share, start = rank.experts(count), *_inner_share(inner, rank)
        gate_up, down = (count, 2 * inner, hidden), (count, hidden, inner)
        w13 = [
            Part(
                f"{self.source}.gate_up_proj",
                gate_up,
                Box((expert, half * inner + start, 0), (experts, share, hidden)),
                Box((local, half * share, 0), (experts, share, hidden)),
            )
            for expert, local, experts in _runs(here)
            for half in range(2)
        ]
        w2 = [
            Part(
                f"{self.source}.down_proj",
                down,
                Box((expert, 0, start), (experts, hidden, share)),
                Box((local, 0, 0), (experts, hidden, share)),
            )
            for expert, local, experts in _runs(here)
        ]
        column, row = _kind("column", rank), _kind("row", rank)
        yield Wanted(f"{self.name}.w13_weight", (len(here), 2 * share, hidden), column, tuple(w13), linear=True)
        yield Wanted(f"{self.name}.w2_weight", (len(here), hidden, share), row, tuple(w2), linear=True)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Gated experts that are stacked on disk already, ``[experts, in, out]``, with biases: GPT-OSS.

    Gate and up are interleaved, a gate at each even place of ``out``; so they stay, and a rank has both of each pair.
    The bias of ``w2`` is there once: where ranks share experts, all but the first have zeros.
    """

    name: str
    source: str

    def wanted(self, model: ModelShape, rank: Rank) -> Iterator[Wanted]:
        count, hidden, inner = model.size("experts"), model.size("hidden"), model.size("expert_intermediate")
        here, share, start = rank.experts(count), *_inner_share(inner, rank)

        def parts(source: str, shape: Shape, begin: Shape, extents: Shape) -> tuple[Part, ...]:
            """The box of each local expert, transposed where it is a matrix."""
            is_matrix = len(extents) == 2
            kept = extents[::-1]
            return tuple(
                Part(
                    f"{self.source}.{source}",
                    (count, *shape),
                    Box((expert, *begin), (experts, *extents)),
                    Box((local, *(0 for _ in kept)), (experts, *kept)),
                    transposed=is_matrix,
                )
                for expert, local, experts in _runs(here)
            )

        w13 = parts("gate_up_proj", (hidden, 2 * inner), (0, 2 * start), (hidden, 2 * share))
        w2 = parts("down_proj", (inner, hidden), (start, 0), (share, hidden))
        w13_bias = parts("gate_up_proj_bias", (2 * inner,), (2 * start,), (2 * share,))
        has_bias = start == 0
        w2_bias = parts("down_proj_bias", (hidden,), (0,), (hidden if has_bias else 0,))
        blank = () if has_bias else (Box((0, 0), (len(here), hidden)),)
        column, row = _kind("column", rank), _kind("row", rank)
        yield Wanted(f"{self.name}.w13_weight", (len(here), 2 * share, hidden), column, w13, linear=True)
        yield Wanted(f"{self.name}.w13_bias", (len(here), 2 * share), column, w13_bias)
        yield Wanted(f"{self.name}.w2_weight", (len(here), hidden, share), row, w2, linear=True)
        yield Wanted(f"{self.name}.w2_bias", (len(here), hidden), _kind("replicated", rank), w2_bias, blank)


def _runs(experts: range) -> Iterator[tuple[int, int, int]]:
    """(first expert, its local index, how many) of each run of experts that follow each other."""
    if experts.step == 1:
        yield experts.start, 0, len(experts)
    else:
        yield from ((expert, local, 1) for local, expert in enumerate(experts))


def _inner_share(inner: int, rank: Rank) -> tuple[int, int]:
    """(length, start) of what this rank holds of each expert's intermediate size. Raises Indivisible."""
    share = rank.within_experts.share(inner, f"expert_intermediate size {inner}")
    return share, share * rank.within_experts.index


def _kind(cut: PartKind, rank: Rank) -> PartKind:
    return cut if rank.expert_ranks == 1 else "experts"


def every_nth(model: ModelShape, layer: int) -> bool:
    """Whether a layer of Qwen's has experts: each ``decoder_sparse_step``-th has, but those of ``mlp_only_layers``."""
    dense = model.config.get("mlp_only_layers") or []
    if not isinstance(dense, (list, tuple)) or not all(type(index) is int for index in dense):
        raise ModelConfigError(
            "config.json's mlp_only_layers is unusable", expected="a list of layer numbers", found=shown(dense)
        )
    return layer not in dense and (layer + 1) % model.number("decoder_sparse_step") == 0


def after_the_dense(model: ModelShape, layer: int) -> bool:
    """Whether a layer of DeepSeek's has experts: from ``first_k_dense_replace`` on, each ``moe_layer_freq``-th."""
    has_experts = model.value("n_routed_experts") is not None
    return has_experts and layer >= model.count("first_k_dense_replace") and layer % model.number("moe_layer_freq") == 0


def without(rule: LayerRule) -> LayerRule:
    """The layers that ``rule`` does not hold for."""
    return lambda model, layer: not rule(model, layer)
