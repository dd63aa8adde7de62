"""runai-model-streamer: as it gives tensors, views of buffers that it hands over, and with a copy of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from runai_model_streamer import SafetensorsStreamer

from tests.benchmarks.clock import Clock
from tests.benchmarks.loading.kept import result


def buffers_handed_over(directory: str, files: Sequence[str], sample: str) -> dict[str, Any]:
    """Tensors share the streamer's buffers, which are the caller's from then on (``owned``, its default)."""
    return _stream(files, sample, owned=True)


def private_copies(directory: str, files: Sequence[str], sample: str) -> dict[str, Any]:
    """The streamer uses its buffers again, every tensor is cloned: memory that holds nothing but the tensor."""
    return _stream(files, sample, owned=False)


def _stream(files: Sequence[str], sample: str, *, owned: bool) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    clock = Clock()
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(files), owned=owned)
        for name, tensor in streamer.get_tensors():
            tensors[name] = tensor if owned else tensor.clone()
    return result(clock.read(), tensors, sample)
