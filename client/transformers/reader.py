"""Where Transformers asks for a checkpoint's files it gets none, and where it reads them, the tensors of a weight set.

Owns that exchange, for weights of either layout; where they come from is `loading.py`'s, whether they fit `fit.py`'s.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightcached.client.segments import torch_device
from weightcached.client.transformers import fit
from weightcached.client.transformers.engine import ADAPTER
from weightcached.client.transformers.hooks import Found
from weightcached.client.transformers.switching import remember_copies
from weightcached.client.weights import WeightSet
from weightcached.protocol.memory.chosen import CPU

Source = Callable[[Path], WeightSet | None]
"""Weights for the checkpoint in a directory; ``None``: Transformers is to read the files."""


class _NoFiles(list[str]):
    """What Transformers gets where it asked for files: none, and with them the weights to have instead."""

    def __init__(self, weights: WeightSet) -> None:
        super().__init__()
        self.weights = weights


class CacheReader:
    """A :class:`Reader` that loads from what ``source`` gives; ``delivered`` hears of each model and its weights."""

    def __init__(self, source: Source, *, delivered: Callable[[Any, WeightSet], None], device: str = CPU) -> None:
        self.asked = False
        """Whether Transformers has asked for a model's files at all."""
        self._source = source
        self._delivered = delivered
        self._device = device
        """A config's, for what Transformers reads itself: the weights of ``source`` are where they are."""
        self._mapping = False

    def find(self, asked: Mapping[str, Any], ask: Callable[[], Found]) -> Found:
        explicit = asked.get("transformers_explicit_filename")
        if explicit is not None and explicit.startswith("adapter_model."):
            return ask()  # PEFT's, whose files are read beside the model's
        self.asked = True
        _require_whole_checkpoint(asked, explicit)
        weights = self._source(_directory(asked, ask))
        if weights is None:
            return ask()
        _require_no_metadata(weights)
        from transformers.modeling_utils import get_state_dict_dtype

        return _NoFiles(weights), {"dtype": get_state_dict_dtype(weights)}

    def load(self, call: inspect.BoundArguments, load: Callable[[], Any]) -> Any:
        files, load_config = call.arguments["checkpoint_files"], call.arguments["load_config"]
        if not isinstance(files, _NoFiles):
            if self._device != CPU and load_config.device_map is None:
                call.arguments["load_config"] = replace(load_config, device_map={"": torch_device(self._device)})
            return load()
        device = files.weights.torch_device
        fit.require_plain(load_config, call.arguments["state_dict"], device)
        if files:
            raise fit.refused("the configuration's further files", ", ".join(files))
        model, weights = call.arguments["model"], files.weights
        load_config = replace(load_config, device_map={"": device})  # else Transformers copies all to the host
        engine_made = weights.meta.config["layout"] == ADAPTER.name
        if engine_made:  # today's names, and values as they are wanted: there is nothing left to convert
            load_config = replace(load_config, weight_mapping=[])
        tensors = {name: weights[name] for name in weights if weights.manifest.geometry(name).alias_of is None}
        fit.require_mappable(model, tensors, load_config)
        call.arguments.update(state_dict=tensors, checkpoint_files=None, load_config=load_config)
        self._mapping = True
        try:
            result = load()
        finally:
            self._mapping = False
        if engine_made:
            model._weight_conversions = None  # as of a model that was not loaded: saved as its class is by default
        storages = fit.storages_of(tensors.values())
        info = result[0] if isinstance(result, tuple) else result
        remember_copies(model, fit.give_buffers_memory(model, storages))
        lacking = {*info.missing_keys, *(name for name, *_ in info.mismatched_keys)}
        fit.require_mapped(model, storages, without=lacking)
        if engine_made and load_config.hf_quantizer is not None:
            fit.require_complete(model, lacking)
        self._delivered(model, weights)
        return result

    def warm(self, warm: Callable[[], None]) -> None:
        """What is mapped needs no memory of the GPU besides its own."""
        if not self._mapping:
            warm()


def _directory(asked: Mapping[str, Any], ask: Callable[[], Found]) -> Path:
    """Where the checkpoint is. A hub id is resolved by Transformers, which downloads what is not there."""
    name = asked["pretrained_model_name_or_path"]
    if name is None:
        raise fit.refused("state_dict", "weights of its own, and no checkpoint")
    directory = Path(name)
    if directory.is_dir():
        return directory / ((asked.get("download_kwargs") or asked).get("subfolder") or "")
    files, _ = ask()
    if not files:
        raise fit.refused("a checkpoint without files", name)
    return Path(files[0]).parent


def _require_whole_checkpoint(asked: Mapping[str, Any], explicit: str | None) -> None:
    """The daemon holds what the index names; an argument for other files than these is refused by its name."""
    named = {
        "variant": asked.get("variant"),
        "gguf_file": asked.get("gguf_file"),
        "use_safetensors": None if asked.get("use_safetensors") is not False else "False",
        "transformers_weights in config.json": explicit,
    }
    for option, value in named.items():
        if value is not None:
            raise fit.refused(option, value)


def _require_no_metadata(weights: WeightSet) -> None:
    """Methods whose tensors are more than a name, a shape and a dtype are refused by name."""
    config: Any = weights.meta.config["model"]
    if (config.get("quantization_config") or {}).get("quant_method") == "torchao":
        raise fit.refused("a checkpoint quantized with torchao", "tensors whose form stands in the files' metadata")
