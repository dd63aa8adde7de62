"""Who has what: this rank's chunk of an axis, its experts, its layers. Tensors and lists are split, no more."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightcached.protocol.config import Parallel

_VOCABULARY_MULTIPLE = 64


class NotCompared(Exception):
    """The reference has no rule for this parameter; the text says why."""


class Unfit(Exception):
    """The files' tensors make no such parameter: their shapes do not go together, or ranks cannot share them."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Tensor-parallel rank ``index`` of ``size``, and its place in the other two kinds of parallelism."""

    size: int = 1
    index: int = 0
    expert_ranks: int = 1
    expert_rank: int = 0
    in_turn: bool = False
    stages: int = 1
    stage: int = 0

    @classmethod
    def of(cls, parallel: Parallel) -> Ranks:
        return cls(
            parallel.tp_size,
            parallel.tp_rank,
            parallel.ep_size,
            parallel.ep_rank,
            parallel.expert_placement == "round_robin",
            parallel.pp_size,
            parallel.pp_rank,
        )

    @property
    def within_experts(self) -> Ranks:
        """Who shares one expert: all tensor-parallel ranks, or nobody where ranks hold whole ones."""
        return self if self.expert_ranks == 1 else Ranks()

    def share(self, tensor: torch.Tensor, axis: int, pieces: int | None = None) -> torch.Tensor:
        """This rank's of ``pieces`` equal pieces: as many as ranks, or fewer, each of which several ranks have."""
        pieces = self.size if pieces is None else min(pieces, self.size)
        if tensor.shape[axis] % pieces or self.size % pieces:
            raise Unfit(f"{pieces} of {self.size} ranks cannot share {tensor.shape[axis]} evenly")
        return tensor.chunk(pieces, axis)[self.index // (self.size // pieces)]

    def vocabulary(self, tensor: torch.Tensor) -> torch.Tensor:
        """Padded with rows of zeros, then shared."""
        padding = tensor.new_zeros(-len(tensor) % _VOCABULARY_MULTIPLE, *tensor.shape[1:])
        return self.share(torch.cat([tensor, padding]), 0)

    def experts(self, count: int) -> list[int]:
        """Dealt in turn, or in heaps of which the first are one larger."""
        every = torch.arange(count)
        here = every[self.expert_rank :: self.expert_ranks] if self.in_turn else every.tensor_split(self.expert_ranks)
        return [int(expert) for expert in (here if self.in_turn else here[self.expert_rank])]

    def layers(self, count: int) -> range:
        """An even share each; what is left over goes to the stages before the last, backwards."""
        shares = [count // self.stages] * self.stages
        for position in range(count % self.stages):
            shares[-2 - position] += 1
        first = sum(shares[: self.stage])
        return range(first, first + shares[self.stage])
