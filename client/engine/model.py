"""Owns the model in this process: configuration, tokenizer, and a module with its weights in it.

The module comes from Transformers' own ``from_pretrained`` (:func:`load_with_transformers`, the ordinary way and what
everything else is compared with), or is built without weights and bound to a :class:`WeightSet`
(:func:`bind_to_weights`). Both give the same class with byte-identical state. Only `command.py` calls these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weightcached.client.bind import bind, meta_parameters
from weightcached.protocol.errors import (
    BindError,
    CheckpointError,
    MissingTensor,
    ModelConfigError,
    ShapeMismatch,
    UnsupportedModel,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from weightcached.client.weights import WeightSet

Kind = Literal["decoder", "encoder"]


@dataclass(frozen=True)
class Recipe:
    """Everything about a model but its weights."""

    directory: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    model_class: type[PreTrainedModel]

    @property
    def kind(self) -> Kind:
        return "decoder" if self.model_class.can_generate() else "encoder"

    @property
    def dtype(self) -> torch.dtype | None:
        """What ``config.json`` says its floating-point parameters are; ``None`` where it does not."""
        dtype: torch.dtype | None = self.config.dtype
        return dtype


def import_transformers() -> None:
    """Imports what every engine needs, so that its seconds are counted once and by name. Quiets its progress bars."""
    import torch  # noqa: F401
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def read_config_and_tokenizer(directory: Path) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Both from the checkpoint in ``directory``; never from the network, and never its own code.

    Raises ModelConfigError where they cannot be read.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        return (
            AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False),
            AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False),
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelConfigError(
            "Transformers cannot read the model's configuration or tokenizer",
            found=_first_line(error),
            where=directory,
            next_step="the directory needs config.json and the tokenizer's files",
        ) from error


def import_model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that ``config.json`` names: the one whose parameters are called what the checkpoint's tensors are.

    Importing a model's module takes seconds. Raises UnsupportedModel for what this engine cannot serve.
    """
    import transformers

    name = (config.architectures or [""])[0]
    found = getattr(transformers, name, None) if name else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UnsupportedModel(
            f"Transformers {transformers.__version__} has no such architecture",
            expected="a model class of Transformers in config.json's `architectures`",
            found=name or None,
        )
    if config.is_encoder_decoder:
        raise UnsupportedModel("this engine serves decoders and encoders, not both in one", found=name)
    return found


def load_with_transformers(recipe: Recipe, *, dtype: str) -> PreTrainedModel:
    """``from_pretrained`` from disk, in evaluation mode. ``dtype`` is a name, or ``auto``.

    Raises MissingTensor and ShapeMismatch where Transformers would go on with random values.
    """
    try:
        model, info = recipe.model_class.from_pretrained(
            recipe.directory, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            "Transformers cannot load the checkpoint", found=_first_line(error), where=recipe.directory
        ) from error
    if info["missing_keys"]:
        raise MissingTensor(
            "the checkpoint lacks parameters", found=sorted(info["missing_keys"]), where=recipe.directory
        )
    if info["mismatched_keys"]:
        raise ShapeMismatch(
            "the checkpoint has other shapes", found=sorted(map(str, info["mismatched_keys"])), where=recipe.directory
        )
    return model.eval()


def bind_to_weights(recipe: Recipe, weights: WeightSet, *, dtype: str) -> PreTrainedModel:
    """The module built without weights, every parameter then bound to ``weights``, tied, in evaluation mode.

    The module holds the mapping; ``weights`` keeps the lease and has to be kept. Raises BindError.
    """
    import torch

    wanted = getattr(torch, dtype) if dtype != "auto" else recipe.dtype or _floating_dtype(weights)
    with meta_parameters():
        module = recipe.model_class._from_config(recipe.config, dtype=wanted)
    try:
        bind(module, weights, ignore_unexpected=_ignorable(module, weights))
    except BindError as error:
        raise _with_next_step(error, recipe, wanted, weights) from error
    module.tie_weights()
    return module.eval()


def _floating_dtype(weights: WeightSet) -> torch.dtype:
    """What `dtype="auto"` means where config.json is silent, as in ``from_pretrained``: what the files hold."""
    return next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())


def _ignorable(module: PreTrainedModel, weights: WeightSet) -> tuple[str, ...]:
    """Names in ``weights``, as patterns for :func:`bind`, that ``from_pretrained`` finds and does not use either.

    Older checkpoints hold buffers that are computed now; the class's patterns are regular expressions to search for.
    """
    patterns = set(module._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in module.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return tuple(escape(name) for name in weights if any(re.search(pattern, name) for pattern in patterns))


def _with_next_step(error: BindError, recipe: Recipe, wanted: torch.dtype, weights: WeightSet) -> BindError:
    """The same error with what an operator of this engine can do about its two common causes."""
    held = _floating_dtype(weights)
    if held != wanted:
        advice = f"config.json says {wanted}, the weights are {held}: give daemon and engine one --dtype"
    else:
        advice = (
            "this engine needs a model whose parameters are called in Transformers what the checkpoint calls them "
            f"({recipe.model_class.__name__}); --weight-cache-mode off serves it from disk"
        )
    return BindError(error.message, expected=error.expected, found=error.found, where=error.where, next_step=advice)


def state_of(module: Any) -> dict[str, torch.Tensor]:
    """Name → tensor of all parameters and buffers, tied names and non-persistent buffers too: what two loads share."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
