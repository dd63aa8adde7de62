"""What is put in the place of functions of Transformers while a block of :func:`reading` runs, and put back after.

They are where ``from_pretrained`` asks for a checkpoint's files, where it reads them into the module, and where it
takes a GPU's memory for what it is going to read. Everything else of a load stays Transformers' own: names and their
conversion, prefixes of base models, tied and missing weights, buffers, the generation config. Knows nothing of daemons:
a :class:`Reader` says what happens instead.

Calls of other threads and tasks, and those outside a block, go through unchanged.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from weightcached.protocol.errors import BindError, UnsupportedModel

FIND = "_get_resolved_checkpoint_files"
"""A function of ``transformers.modeling_utils``: the files of a checkpoint, downloaded where they have to be."""
LOAD = "_load_pretrained_model"
"""A method of ``PreTrainedModel``: files, or a state dict, into a module whose parameters are on the meta device."""

WARM = "caching_allocator_warmup"
"""A function of ``transformers.modeling_utils``, in releases that have it: takes as much memory of a GPU as all that is
to be read there will need."""

_FIND_TAKES = frozenset({"pretrained_model_name_or_path", "variant", "gguf_file", "use_safetensors"})
_LOAD_TAKES = frozenset({"model", "state_dict", "checkpoint_files", "load_config"})

Found = tuple[list[str] | None, dict[str, Any] | None]
"""What the first function answers: names of files, and what their index says beside its table of names."""


class Reader(Protocol):
    """What is done instead, by the thread that entered the block."""

    def find(self, asked: Mapping[str, Any], ask: Callable[[], Found]) -> Found:
        """Instead of looking for files: ``asked`` are the arguments, ``ask`` is the function itself."""

    def load(self, call: inspect.BoundArguments, load: Callable[[], Any]) -> Any:
        """Instead of reading them: ``load`` is the function itself, with the arguments as ``call`` has them by then."""

    def warm(self, warm: Callable[[], None]) -> None:
        """Instead of taking a GPU's memory beforehand, while they are read: ``warm`` is the function itself."""


@dataclass(eq=False)
class _Block:
    reader: Reader
    thread: int = field(default_factory=threading.get_ident)
    """Whose block it is: ``asyncio.to_thread`` takes the context along to another one."""
    ended: bool = False
    """In a copy of its context, which others have, it may stand for longer than it lasts."""


_entered: ContextVar[tuple[_Block, ...]] = ContextVar("weightcached_blocks", default=())
"""Blocks of this context, the innermost last. Each task of asyncio has a context of its own."""

_lock = threading.Lock()
_blocks = 0
_undo: Callable[[], None] | None = None


@contextmanager
def reading(reader: Reader) -> Iterator[None]:
    """In this block, and by this thread and task, what Transformers loads is found and read by ``reader``.

    Raises UnsupportedModel where this release of Transformers has not got the first two; BindError at the end of a
    block that overlaps another one of its thread and task without lying within it (generators, exit stacks).
    """
    _enter()
    try:
        block = _Block(reader)
        _entered.set((*_entered.get(), block))
        try:
            yield
        finally:
            _end(block)
    finally:
        _leave()


def _end(block: _Block) -> None:
    """Takes out this very block. Where it is not the innermost, loads may have gone to the wrong reader: an error."""
    block.ended = True
    blocks = _entered.get()
    _entered.set(tuple(one for one in blocks if one is not block))
    if not blocks or blocks[-1] is not block:
        raise BindError(
            "a block that takes weights from elsewhere ended while it was not the innermost",
            expected="blocks of one thread and task that lie within each other",
            found="a block that began later and has not ended" if block in blocks else "a context other than its own",
            next_step="leave blocks in the reverse order, where they were entered; keep none open across a yield",
        )


def _reader() -> Reader | None:
    """Of the innermost block of this thread and task."""
    here = threading.get_ident()
    return next((one.reader for one in reversed(_entered.get()) if one.thread == here and not one.ended), None)


def _enter() -> None:
    global _blocks, _undo
    with _lock:
        if _blocks == 0:
            _undo = _install()
        _blocks += 1


def _leave() -> None:
    global _blocks, _undo
    with _lock:
        _blocks -= 1
        if _blocks == 0 and _undo is not None:
            _undo()
            _undo = None


def _install() -> Callable[[], None]:
    """Puts both in place; returns what undoes it."""
    from transformers import modeling_utils

    model_class = modeling_utils.PreTrainedModel
    find: Callable[..., Found] = _required(modeling_utils, FIND, _FIND_TAKES)
    load = inspect.getattr_static(model_class, LOAD, None)  # a class method in some releases, a static one in others
    function: Callable[..., Any] = _required(model_class, LOAD, _LOAD_TAKES, getattr(load, "__func__", None))
    found, loaded = _finding(find), type(load)(_loading(function))
    setattr(modeling_utils, FIND, found)
    setattr(model_class, LOAD, loaded)
    warm = getattr(modeling_utils, WARM, None)
    warmed = None if warm is None else _warming(warm)
    if warmed is not None:
        setattr(modeling_utils, WARM, warmed)

    def undo() -> None:
        # Whoever has put something of their own over ours meanwhile keeps it: ours, below it, lets everything through.
        if getattr(modeling_utils, FIND) is found:
            setattr(modeling_utils, FIND, find)
        if inspect.getattr_static(model_class, LOAD) is loaded:
            setattr(model_class, LOAD, load)
        if warmed is not None and getattr(modeling_utils, WARM) is warmed:
            setattr(modeling_utils, WARM, warm)

    return undo


def _required(owner: Any, name: str, takes: frozenset[str], function: Any = None) -> Callable[..., Any]:
    import transformers

    function = function or getattr(owner, name, None)
    lacking = takes if not callable(function) else takes - inspect.signature(function).parameters.keys()
    if lacking:
        raise UnsupportedModel(
            "this release of Transformers loads checkpoints in a way that this release does not know",
            expected=f"{owner.__name__}.{name} with {', '.join(sorted(takes))}",
            found=f"Transformers {transformers.__version__}, without {', '.join(sorted(lacking))}",
            next_step="install another release of Transformers, or of weightcached",
        )
    return function  # type: ignore[no-any-return]


def _finding(original: Callable[..., Found]) -> Callable[..., Found]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def find(*args: Any, **kwargs: Any) -> Found:
        reader = _reader()
        if reader is None:
            return original(*args, **kwargs)
        asked = signature.bind(*args, **kwargs)
        asked.apply_defaults()
        return reader.find(asked.arguments, lambda: original(*args, **kwargs))

    return find


def _warming(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def warm(*args: Any, **kwargs: Any) -> None:
        reader = _reader()
        if reader is None:
            original(*args, **kwargs)
        else:
            reader.warm(lambda: original(*args, **kwargs))

    return warm


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        reader = _reader()
        if reader is None:
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        return reader.load(call, lambda: original(*call.args, **call.kwargs))

    return load
