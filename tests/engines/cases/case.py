"""What a case is: a small model of a real architecture, its placements, and what each side is told about it.

Its checkpoint has the names and shapes that Transformers writes for its config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.checkpoints import RawTensor

Tensors = dict[str, RawTensor]

DECODER: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
"""Sizes that TP 8 divides. Heads of 32: vLLM's attention takes 32, 64 and more on a CPU."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A place in the parallel arrangement."""

    tp_rank: int
    tp_size: int
    pp_rank: int = 0
    pp_size: int = 1

    def __str__(self) -> str:
        stage = f"-pp{self.pp_rank}of{self.pp_size}" if self.pp_size > 1 else ""
        return f"tp{self.tp_rank}of{self.tp_size}{stage}"

    @property
    def options(self) -> dict[str, int]:
        """Of ``attach`` and of a daemon."""
        stage = {"pp_rank": self.pp_rank, "pp_size": self.pp_size} if self.pp_size > 1 else {}
        return {"tp_rank": self.tp_rank, "tp_size": self.tp_size, **stage}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, where it is placed, and the options of both sides."""

    name: str
    config: Mapping[str, Any]
    """Arguments of the configuration class of Transformers that ``model_type`` names."""
    tp_sizes: tuple[int, ...] = (1, 2, 4, 8)
    pp_sizes: tuple[int, ...] = (1,)
    expert_placement: Literal["linear", "round_robin"] | None = None
    """With one, ranks hold whole experts, placed like that; without, slices of each."""
    files: int = 1
    auto_class: str = "AutoModelForCausalLM"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Ours, beside the layout and the rank: those of ``attach``, which are a daemon's too."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's: arguments of ``EngineArgs``."""
    edit: Callable[[dict[str, Any], Tensors], None] | None = None
    """Turns ``config.json`` and the tensors into those of another checkpoint, in place: a quantized one, say."""
    engine_only: tuple[str, ...] = ()
    """Endings of the names that only the engine has: what the checkpoint does not have and it starts from."""

    processor: str | None = None
    """What ``/proc/cpuinfo`` has to list, or vLLM refuses the model here."""

    @property
    def why_not_here(self) -> str | None:
        """Why the engine would refuse this on the present machine, if it would."""
        if self.processor is None or self.processor in Path("/proc/cpuinfo").read_text().split():
            return None
        return f"the engine takes {self.name} on processors with {self.processor} only"

    def ranks(self) -> Iterator[Rank]:
        """All of them, those of small arrangements first."""
        for pp_size in self.pp_sizes:
            for tp_size in self.tp_sizes:
                for pp_rank in range(pp_size):
                    yield from (Rank(tp_rank, tp_size, pp_rank, pp_size) for tp_rank in range(tp_size))

    def options_at(self, rank: Rank) -> dict[str, Any]:
        """Of ``attach`` and of a daemon."""
        experts: dict[str, Any] = {}
        if self.expert_placement is not None:
            experts = {"ep_rank": rank.tp_rank, "ep_size": rank.tp_size, "expert_placement": self.expert_placement}
        return {"layout": "fused", **rank.options, **experts, **self.options}

    def engine_options_at(self, rank: Rank) -> dict[str, Any]:
        """Of vLLM's ``EngineArgs``, but for the ranks themselves."""
        experts: dict[str, Any] = {}
        if self.expert_placement is not None and rank.tp_size > 1:
            experts = {"enable_expert_parallel": True, "expert_placement_strategy": self.expert_placement}
        sizes = {"tensor_parallel_size": rank.tp_size, "pipeline_parallel_size": rank.pp_size}
        return {**sizes, **experts, **self.engine_options}
