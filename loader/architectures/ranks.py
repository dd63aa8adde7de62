"""Where one shard stands among the ranks of a model, and the arithmetic of who holds what: rows, experts, layers.

Pure integers. Rows are shared by tensor parallelism (TP, T ranks), whole experts by expert parallelism (EP), layers by
pipeline parallelism (PP, stages). The rules are those of vLLM 0.32; where they round, remainders go where it puts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightcached.protocol.config import Parallel


class Indivisible(Exception):
    """T ranks cannot share ``what`` evenly. The planner's error for it says which T would do."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class TooMany(Exception):
    """More ranks of one ``kind`` (``ep``, ``pp``) than there is to share. The planner's error says how many do."""

    def __init__(self, kind: str, what: str, most: int) -> None:
        super().__init__(what)
        self.kind, self.what, self.most = kind, what, most


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank ``index`` of ``size`` tensor-parallel ranks, and its place in the other two kinds of parallelism."""

    size: int
    index: int
    expert_ranks: int = 1
    expert_rank: int = 0
    round_robin: bool = False
    stages: int = 1
    stage: int = 0

    @classmethod
    def of(cls, parallel: Parallel) -> Rank:
        return cls(
            size=parallel.tp_size,
            index=parallel.tp_rank,
            expert_ranks=parallel.ep_size,
            expert_rank=parallel.ep_rank,
            round_robin=parallel.expert_placement == "round_robin",
            stages=parallel.pp_size,
            stage=parallel.pp_rank,
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the stage that takes tokens in."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that gives logits out."""
        return self.stage == self.stages - 1

    def share(self, number: int, what: str) -> int:
        """``number / T``. Raises Indivisible when it is not whole; ``what`` says what is shared, with its number."""
        if number % self.size:
            raise Indivisible(what)
        return number // self.size

    @property
    def within_experts(self) -> Rank:
        """Who shares each expert's rows with whom: all T ranks, or nobody where ranks have whole experts."""
        return self if self.expert_ranks == 1 else Rank(1, 0)

    def experts(self, count: int) -> range:
        """The experts that this rank holds, in their local order. Raises TooMany.

        Placed one after the other, the first ``count mod EP`` ranks hold one more; placed in turn, rank e holds e,
        e + EP, e + 2 EP and so on.
        """
        if self.expert_ranks > count:
            raise TooMany("ep", f"{count} experts", count)
        if self.round_robin:
            return range(self.expert_rank, count, self.expert_ranks)
        each, more = divmod(count, self.expert_ranks)
        first = self.expert_rank * each + min(self.expert_rank, more)
        return range(first, first + each + (self.expert_rank < more))

    def layers(self, count: int) -> range:
        """The layers of this stage, by their global index. Raises TooMany.

        What is left over goes, one layer each, to the last stages but the very last, which has the output head.
        """
        if self.stages > count:
            raise TooMany("pp", f"{count} layers", count)
        each, more = divmod(count, self.stages)
        larger_from = self.stages - 1 - more
        first = self.stage * each + min(max(self.stage - larger_from, 0), more)
        return range(first, first + each + (larger_from <= self.stage < self.stages - 1))
