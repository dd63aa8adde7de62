"""fastsafetensors without GPUDirect: whole files into one allocation each, which the tensors then own together.

By itself it reads local files with O_DIRECT; ``FASTSAFETENSORS_ODIRECT=0`` makes it read through the page cache. Both
are measured (the environment decides), each a contender of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastsafetensors import SafeTensorsFileLoader, SingleGroup

from tests.benchmarks.clock import Clock
from tests.benchmarks.loading.kept import result


def load(directory: str, files: Sequence[str], sample: str) -> dict[str, Any]:
    """``copy_files_to_device("cpu")`` and every tensor; they stay valid after closing, so no clone is needed."""
    clock = Clock()
    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: list(files)})
    buffers = loader.copy_files_to_device()
    tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    buffers.close()
    loader.close()
    return result(clock.read(), tensors, sample)
