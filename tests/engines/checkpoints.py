"""Checkpoints of the cases: names, shapes and config.json as Transformers writes them, bytes that follow from names."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import safetensors
import torch
import transformers

from tests.engines.cases.case import Case, Tensors
from tests.support.checkpoints import raw_tensor, write_checkpoint

transformers.utils.logging.disable_progress_bar()


def write(case: Case, directory: Path) -> Path:
    """Write the checkpoint of ``case``. Returns ``directory``."""
    config, tensors = _as_saved(case)
    if case.edit is not None:
        case.edit(config, tensors)
    files: dict[str, Tensors] = {}
    for position, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{position % case.files + 1:05}-of-{case.files:05}.safetensors"
        files.setdefault("model.safetensors" if case.files == 1 else file, {})[name] = tensor
    return write_checkpoint(directory, config, files)


def _as_saved(case: Case) -> tuple[dict, Tensors]:
    """config.json and tensors of the model as Transformers saves it, its bytes replaced."""
    model = getattr(transformers, case.auto_class).from_config(
        transformers.AutoConfig.for_model(**case.config), dtype=torch.bfloat16
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safetensors.safe_open(Path(folder, "model.safetensors"), "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            tensors = {name: raw_tensor(name, part.get_shape(), part.get_dtype()) for name, part in slices.items()}
        return json.loads(Path(folder, "config.json").read_text()), tensors
