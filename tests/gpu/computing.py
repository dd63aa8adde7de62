"""The engine of a row: ``python -m tests.gpu.computing SETTING MODEL RUNTIME_DIR``. Attaches to weights of kind
``cuda-ipc``, says whether they are what their digests say, and multiplies with them until it is ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.gpu.row import Setting
from tests.gpu.serving import attached


def main(setting: Setting, model: Path, runtime_dir: Path) -> None:
    import torch

    with attached(setting, model, runtime_dir, memory="cuda-ipc") as weights:
        print("same" if not weights.differing() else "other bytes", flush=True)
        matrix = max(weights.values(), key=torch.Tensor.numel)
        operand = torch.ones(matrix.shape[1], 8, dtype=matrix.dtype, device=matrix.device)
        while True:
            (matrix @ operand).sum().item()


if __name__ == "__main__":
    main(Setting(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]))
