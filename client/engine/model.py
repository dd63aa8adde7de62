"""Owns the model in this process: configuration, tokenizer, and a module with its weights in it.

The module comes from Transformers' own ``from_pretrained``, which reads the checkpoint or is bound to a
:class:`WeightSet` (`client/transformers`): the same class with byte-identical state. Only `command.py` calls these.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weightcached.client.segments import torch_device
from weightcached.client.transformers.loading import binding_to
from weightcached.protocol.errors import (
    BindError,
    CheckpointError,
    MissingTensor,
    ModelConfigError,
    ShapeMismatch,
    UnsupportedModel,
    WeightCacheError,
)
from weightcached.protocol.memory.chosen import CPU

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from weightcached.client.weights import WeightSet

Kind = Literal["decoder", "encoder"]
_OTHERWISE = (
    "--layout transformers, from a daemon with --engine transformers; or --weight-cache-mode off serves it from disk"
)


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


def load(recipe: Recipe, weights: WeightSet | None, *, dtype: str, device: str = CPU) -> PreTrainedModel:
    """``from_pretrained``, in evaluation mode: bound to ``weights`` where these are, or from disk to a config's
    ``device``. ``dtype`` is a name, or ``auto``.

    The module holds the mapping; ``weights`` keeps the lease and has to be kept. Raises MissingTensor and ShapeMismatch
    where Transformers would go on with random values, BindError and UnsupportedModel where it would not map.
    """
    with binding_to(weights) if weights is not None else nullcontext():
        try:
            model, info = recipe.model_class.from_pretrained(
                recipe.directory, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        except BindError as error:
            raise _for_this_engine(error, "give daemon and engine one --dtype") from error
        except UnsupportedModel as error:
            raise _for_this_engine(error, _OTHERWISE) from error
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
    return model if weights is not None or device == CPU else model.to(torch_device(device))


def _for_this_engine(error: WeightCacheError, next_step: str) -> WeightCacheError:
    """The same error with what an operator of this engine can do about it."""
    return type(error)(
        error.message, expected=error.expected, found=error.found, where=error.where, next_step=next_step
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
