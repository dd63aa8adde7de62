"""The engine of a row: ``python -m tests.gpu.engine WHAT SETTING MODEL RUNTIME_DIR MEMORY``. Attaches, and says whether
the weights are what their digests say. WHAT it does then: ``check`` lets go when its standard input ends, ``compute``
multiplies with them until it is ended.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from subprocess import Popen
from typing import Literal

from tests.gpu.row import Setting, child
from tests.gpu.serving import attached


def engine(
    what: Literal["check", "compute"], setting: Setting, model: Path, runtime_dir: Path, *, memory: str
) -> AbstractContextManager[Popen[str]]:
    """One, whose first line is ``same`` where the weights are right."""
    return child("tests.gpu.engine", what, json.dumps(asdict(setting)), str(model), str(runtime_dir), memory)


def main(what: str, setting: Setting, model: Path, runtime_dir: Path, memory: str) -> None:
    import torch

    with attached(setting, model, runtime_dir, memory=memory) as weights:
        print("same" if not weights.differing() else "other bytes", flush=True)
        if what == "check":
            sys.stdin.read()
            return
        matrix = max(weights.values(), key=torch.Tensor.numel)
        operand = torch.ones(matrix.shape[1], 8, dtype=matrix.dtype, device=matrix.device)
        while True:
            (matrix @ operand).sum().item()


if __name__ == "__main__":
    main(sys.argv[1], Setting(**json.loads(sys.argv[2])), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
