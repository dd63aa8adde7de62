"""Places of ranks in every kind of parallelism, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spot:
    """A rank's place in every kind of parallelism."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    round_robin: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As ``build_config`` and ``attach`` take it."""
        return {
            "tp_size": self.tp,
            "tp_rank": self.tp_rank,
            "ep_size": self.ep,
            "ep_rank": self.ep_rank,
            "pp_size": self.pp,
            "pp_rank": self.pp_rank,
            "expert_placement": "round_robin" if self.round_robin else "linear",
        }
