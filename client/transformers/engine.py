"""The adapter of engine ``transformers``: the state that ``from_pretrained`` makes of a checkpoint, for any class.

For models whose parameters are made out of other tensors than the checkpoint's (experts that are stacked, weights that
are dequantized), and for all others as well. `loading.py` binds to what it makes. The module is of the class that
``config.json`` names, or the argument ``--model-class``; a class that shares its body can be bound to it too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from weightcached.client.transformers.hooks import Found, reading
from weightcached.protocol.config import read_model_config
from weightcached.protocol.engines import Built, EngineRequest, NamedTensor, Progress
from weightcached.protocol.errors import InvalidOption, MissingTensor, ShapeMismatch, UnsupportedModel

if TYPE_CHECKING:
    import inspect

_CONVERTING = ("compressed-tensors", "gptqmodel", "torchao")
"""Packages whose code makes bytes of a checkpoint that is quantized."""


class TransformersAdapter:
    """See `protocol/engines.py` for what an adapter is."""

    name = "transformers"
    revision = 1

    def key(self, request: EngineRequest) -> Mapping[str, Any]:
        """Versions, class and dtype. Of a quantized checkpoint the form of the state too: which methods Transformers
        keeps, and which it has to undo, depends on packages and devices that are there.
        """
        model_class = _model_class(request)
        import torch
        import transformers

        config = read_model_config(request.model_dir)
        entries = {
            "stage": "after",
            "transformers": transformers.__version__,
            "torch": torch.__version__.partition("+")[0],
            "model_class": model_class.__name__,
            "dtype": request.dtype,
        }
        if config.get("quantization_config"):
            entries |= {name: _version(name) for name in _CONVERTING}
            entries["form"] = _form(_without_weights(model_class, request))
        return entries

    def build(self, request: EngineRequest, progress: Progress) -> Built:
        """Parameters and persistent buffers, tied ones under all their names. Blocks for as long as Transformers does.

        Raises MissingTensor and ShapeMismatch where Transformers would go on with random values.
        """
        progress("import transformers")
        model_class = _model_class(request)
        progress("load weights")
        model, info = model_class.from_pretrained(request.model_dir, output_loading_info=True, **_arguments(request))
        if info["missing_keys"]:
            raise MissingTensor(
                f"the checkpoint lacks parameters of {model_class.__name__}",
                found=", ".join(sorted(info["missing_keys"])[:8]),
                where=request.model_dir,
                next_step="name the class that the checkpoint is of: -- --model-class NAME",
            )
        if info["mismatched_keys"]:
            raise ShapeMismatch(
                f"the checkpoint has other shapes than {model_class.__name__}",
                found=", ".join(sorted(map(str, info["mismatched_keys"]))[:8]),
                where=request.model_dir,
            )
        return Built(tensors=tuple(_named(model)))


ADAPTER = TransformersAdapter()


def _arguments(request: EngineRequest) -> dict[str, Any]:
    return {"dtype": request.dtype, "local_files_only": True, "trust_remote_code": False}


def _model_class(request: EngineRequest) -> Any:
    """The class of Transformers that is built. Raises InvalidOption, UnsupportedModel."""
    if request.parallel.tp_size * request.parallel.pp_size * request.parallel.ep_size > 1:
        raise InvalidOption(
            "engine transformers has whole models only", expected="one rank", found=f"{request.parallel}"
        )
    parser = argparse.ArgumentParser(prog="--engine transformers --", add_help=False, exit_on_error=False)
    parser.add_argument("--model-class", metavar="NAME")
    try:
        given, unknown = parser.parse_known_args(list(request.arguments))
    except argparse.ArgumentError as error:
        raise InvalidOption("unusable argument of engine transformers", found=error) from error
    if unknown:
        raise InvalidOption(
            "engine transformers does not know an argument", expected="--model-class NAME", found=" ".join(unknown)
        )
    name = given.model_class or (read_model_config(request.model_dir).get("architectures") or [None])[0]
    import transformers

    found = getattr(transformers, str(name), None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UnsupportedModel(
            f"Transformers {transformers.__version__} has no such model class",
            expected="a model class of Transformers in config.json's architectures, or as --model-class",
            found=name,
            where=request.model_dir,
        )
    return found


def _named(model: Any) -> Iterator[NamedTensor]:
    """What is in the module's state dict, in its order."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        yield NamedTensor(name, tensor, "buffer" if name in buffers else "parameter")


def _form(model: Any) -> str:
    """SHA-256 over names, dtypes and shapes."""
    form = [[one.name, one.kind, str(one.tensor.dtype), list(one.tensor.shape)] for one in _named(model)]
    return hashlib.sha256(json.dumps(form).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class _BuiltWithoutWeights(Exception):
    def __init__(self, model: Any) -> None:
        super().__init__("built")
        self.model = model


class _WithoutWeights:
    """A :class:`Reader` that has no files and stops where they would be read."""

    def find(self, asked: Mapping[str, Any], ask: Callable[[], Found]) -> Found:
        return [], {"dtype": "float32"}  # where config.json does not say: the same on both sides is all that counts

    def load(self, call: inspect.BoundArguments, load: Callable[[], Any]) -> Any:
        raise _BuiltWithoutWeights(call.arguments["model"])

    def warm(self, warm: Callable[[], None]) -> None:
        """Nothing is read."""


def _without_weights(model_class: Any, request: EngineRequest) -> Any:
    """The module as it is before weights are read into it: quantized layers in place, parameters on the meta device."""
    try:
        with reading(_WithoutWeights()):
            model_class.from_pretrained(request.model_dir, **_arguments(request))
    except _BuiltWithoutWeights as built:
        return built.model
    raise UnsupportedModel("Transformers loads this checkpoint in a way of its own", where=request.model_dir)
