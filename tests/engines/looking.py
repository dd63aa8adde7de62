"""What a worker of vLLM says of itself when it is asked: vLLM's own way to add a method to its workers.

Imported by vLLM's processes (``worker_extension_cls``), so it imports nothing of the tests. vLLM takes one class; this
one brings along the one that switches weights.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from weightcached.client.vllm.switching import WeightSwitching


class Looking(WeightSwitching):
    """Mixed into vLLM's worker."""

    model_runner: Any
    vllm_config: Any
    rank: int

    def look(self) -> dict[str, Any]:
        """How the model came here, where its parameters are, and what the kernel says of the mapped memory."""
        model = self.model_runner.get_model()
        report = getattr(model, "weightcached", None)
        areas = mapped_areas()
        mapped: dict[int, int] = {}
        elsewhere = []
        for name, parameter in model.named_parameters():
            start, stop = parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes
            if any(low <= start and stop <= high for low, high, _ in areas):
                mapped[start] = parameter.nbytes
            elif parameter.nbytes:
                elsewhere.append(name)
        return {
            "pid": os.getpid(),
            "report": None if report is None else dataclasses.asdict(report),
            "line": None if report is None else report.line(),
            "mapped_nbytes": sum(mapped.values()),
            "elsewhere": elsewhere,
            "private_nbytes": sum(fields["Anonymous"] for _, _, fields in areas),
            "resident_nbytes": sum(fields["Rss"] for _, _, fields in areas),
            "tied": _tied(model),
            "external_nbytes": self._external_nbytes(),
        }

    def write_on(self, rank: int) -> None:
        """Write to a parameter of that rank."""
        import torch

        if self.rank == rank:
            with torch.no_grad():
                next(self.model_runner.get_model().parameters()).flatten()[:1] += 1

    def _external_nbytes(self) -> int:
        """What the loader says when vLLM asks it what weights take elsewhere (it asks where it computes on a GPU)."""
        from vllm.model_executor.model_loader import get_model_loader

        return int(get_model_loader(self.vllm_config.load_config).get_external_weight_memory(self.vllm_config))


def _tied(model: Any) -> list[list[str]]:
    """Names that are one object, sorted."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def mapped_areas() -> list[tuple[int, int, dict[str, int]]]:
    """Start, end and the kernel's account, in bytes, of each area that a segment is mapped to. ``Anonymous`` is what
    this process has of its own there: pages that it has written to.
    """
    areas: list[tuple[int, int, dict[str, int]]] = []
    mine = False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            word, *rest = line.split()
            if not word.endswith(":"):
                mine = "memfd:weightcached" in line
                if mine:
                    low, high = (int(part, 16) for part in word.split("-"))
                    areas.append((low, high, {}))
            elif mine and rest[-1:] == ["kB"]:
                areas[-1][2][word[:-1]] = int(rest[0]) * 1024
    return areas
