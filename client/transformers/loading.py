"""Models of Transformers over the weight cache: its own ``from_pretrained``, with the reading of files replaced.

Owns which weights a load gets (from a daemon, or by the contract none, and then Transformers reads the files itself),
and how long they are kept. What is done with them is `reader.py`'s, what is replaced in Transformers `hooks.py`'s.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

from weightcached.client.attach import attach
from weightcached.client.own_loader import attach_or_none
from weightcached.client.transformers import fit
from weightcached.client.transformers.engine import ADAPTER
from weightcached.client.transformers.hooks import reading
from weightcached.client.transformers.reader import CacheReader
from weightcached.client.weights import WeightSet
from weightcached.protocol.config import Parallel
from weightcached.protocol.engines import EngineRequest, engine_key
from weightcached.protocol.errors import BindError, InvalidOption
from weightcached.protocol.memory.chosen import CPU, chosen

if TYPE_CHECKING:
    import os

CLOSING = "weights of a model that is gone"
"""The name of the threads that give up such weights."""

_NOT_A_WHOLE_MODEL = frozenset(
    {"engine", "quantization", "expert_placement", "tp_size", "tp_rank", "pp_size", "pp_rank", "ep_size", "ep_rank"}
)
_weights: WeakKeyDictionary[Any, WeightSet] = WeakKeyDictionary()


def from_pretrained(
    model_class: Any,
    model: str | os.PathLike[str],
    *model_args: Any,
    weight_cache: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """``model_class.from_pretrained(model, *model_args, **kwargs)``, its parameters mapped from the daemon at a place.

    ``model_class`` is a model class of Transformers or an Auto class. ``weight_cache`` has the options of
    :func:`weights_from_cache`. All else is as Transformers has it: a model in evaluation mode (or a pair with
    ``output_loading_info=True``), buffers of its own, weights that the checkpoint lacks newly initialised with
    Transformers' warning.

    Where mode ``client`` finds no daemon, and in mode ``off``, Transformers reads the files; the first is warned of and
    counted. With ``device`` the model is on that GPU, whoever loads it. Raises InvalidOption for arguments that cannot
    be honoured (another device, quantization while loading, a state dict, other files than the checkpoint's),
    UnsupportedModel where Transformers would have to convert tensors,
    BindError where it would have to cast them, and the errors of ``attach``.
    """
    with weights_from_cache(**(weight_cache or {})):
        return model_class.from_pretrained(model, *model_args, **kwargs)


@contextmanager
def weights_from_cache(**options: Any) -> Iterator[None]:
    """In this block, and by this thread, every ``from_pretrained`` of Transformers has its weights from the daemon.

    ``options`` are those of :func:`weightcached.client.attach` (mode, name, runtime_dir, dtype and so on).
    ``layout="transformers"`` is for a daemon with ``--engine transformers``, ``engine_arguments`` are what stands after
    its ``--``. As :func:`from_pretrained` otherwise. Raises BindError at the end of a block in which nothing was
    loaded: its load was somewhere else, and not from the cache.
    """
    engine_arguments = tuple(options.pop("engine_arguments", ()))
    _require_usable(options)
    home = chosen(options.get("device", CPU), options.get("memory"))
    granted: dict[int, WeightSet] = {}  # those that no model has yet

    def source(directory: Path) -> WeightSet | None:
        made: dict[str, Any] = {}
        if options.get("layout") == ADAPTER.name and options.get("mode") != "off":
            made = made_by_transformers(
                directory, dtype=options.get("dtype", "auto"), device=home.device, arguments=engine_arguments
            )
        weights = attach_or_none(directory, **{**options, **made})
        if weights is not None:
            granted[id(weights)] = weights
        return weights

    def keep(model: Any, weights: WeightSet) -> None:
        _weights[model] = weights
        finalize(model, _close_aside, weights).atexit = False
        del granted[id(weights)]

    reader = CacheReader(source, delivered=keep, device=home.device)
    try:
        with reading(reader):
            yield
    finally:
        for weights in granted.values():
            weights.close()
    if not reader.asked:
        raise BindError(
            "no model was loaded in a block that takes weights from the cache",
            expected="a call of from_pretrained of Transformers, in the block, by the thread that entered it",
            found="none that reads a checkpoint's files",
            next_step="put the call into the block; a directory of a distributed checkpoint cannot be cached",
        )


@contextmanager
def binding_to(weights: WeightSet) -> Iterator[None]:
    """In this block, and by this thread, ``from_pretrained`` binds to ``weights``, which stay the caller's to close.

    The directory it is called with needs ``config.json``, and not the files of the weights.
    """
    with reading(CacheReader(lambda _: weights, delivered=lambda *_: None)):
        yield


def weights_of(model: Any) -> WeightSet | None:
    """The weights that ``model`` was bound to: version, generation, lease. ``None`` where Transformers read the files.

    The lease is given back when ``model`` is gone, or by :meth:`WeightSet.close`; the parameters stay valid as long as
    anything refers to them.
    """
    return _weights.get(model)


def _require_usable(options: Mapping[str, Any]) -> None:
    """Refuses what ``attach`` does not know, and shares of a model or values that Transformers would not make."""
    known = [*(inspect.signature(attach).parameters.keys() - _NOT_A_WHOLE_MODEL - {"model"}), "engine_arguments"]
    for name in sorted(options.keys() - {*known, *_NOT_A_WHOLE_MODEL}):
        near = get_close_matches(name, known, n=1)
        raise InvalidOption(
            "the weight cache has no such option",
            expected=", ".join(sorted(known)),
            found=name + (f", did you mean {near[0]}?" if near else ""),
        )
    for name in sorted(options.keys() & _NOT_A_WHOLE_MODEL):
        raise fit.refused(f"the option {name} of the weight cache", options[name])
    if options.get("layout", "hf") not in ("hf", ADAPTER.name):
        raise InvalidOption(
            "Transformers' models have layout hf or transformers",
            expected=f"hf, or {ADAPTER.name} for a daemon with --engine {ADAPTER.name}",
            found=options["layout"],
        )


def made_by_transformers(
    directory: Path, *, dtype: str = "auto", device: str = CPU, arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """Options of ``attach`` for the layout that Transformers makes: its name, and the key of what this process would
    make of the checkpoint in ``directory``. Imports Transformers. Raises what the adapter's key raises.
    """
    request = EngineRequest(
        model_dir=directory,
        parallel=Parallel(tp_size=1, tp_rank=0),
        dtype=dtype,  # type: ignore[arg-type]  # checked by who builds a config of it
        device=device,
        arguments=tuple(arguments),
    )
    return {"layout": ADAPTER.name, "engine": engine_key(ADAPTER.name, request)}


def _close_aside(weights: WeightSet) -> None:
    """A finalizer may run in the middle of anything, the lease's own work too: whoever waits for that may not be it."""
    threading.Thread(target=weights.close, name=CLOSING, daemon=True).start()
