"""Engine-made layouts: what an engine's adapter is, what it gives, and how one is found by its name.

Owns the interface (:class:`EngineAdapter`) and the entry-point group it is found in. An adapter is somebody else's
code, in a package of their own (`vllm` and `transformers` are ours); nothing else here knows an engine by name.
Imports no adapter but the one that is asked for. Knows nothing of tensors but that an adapter has some:
`loader/engines/` exports them, in the worker. `loader/engines/README.md` is the page for whoever writes one.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, cast, runtime_checkable

from weightcached.protocol.config import LAYOUT_REVISIONS, Parallel
from weightcached.protocol.engine_key import EngineKey
from weightcached.protocol.errors import EngineFailed, InvalidOption, WeightCacheError
from weightcached.protocol.manifest import Kind
from weightcached.protocol.memory.chosen import CPU
from weightcached.protocol.text import shown

ENTRY_POINTS = "weightcached.engines"
"""Entry point ``NAME = "module:object"``: the object is the adapter of the engine NAME."""

Scalar = bool | int | float | str | None

Progress = Callable[[str], None]
"""Told the stage that begins, in a few words (``import vllm``, ``load weights``): engines that wait and people see
it."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """What is to be built: the inputs of a key, and of a build. The same on both sides, paths aside."""

    model_dir: Path
    """The checkpoint: ``config.json`` is there on both sides, weights perhaps on the daemon's only."""
    parallel: Parallel
    """The sizes, and which rank this is."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """``--dtype``; ``auto`` is the engine's own choice, and the key says what that is."""
    device: str = CPU
    """Where the weights are to live: ``cpu``, or ``gpu-`` and the GPU's UUID. An engine that builds on a GPU takes this
    one; what is built in host memory is copied there by the worker."""
    arguments: tuple[str, ...] = ()
    """The engine's own, as they stood after ``--``."""


@dataclass(frozen=True)
class NamedTensor:
    """One tensor under one name. Two names of one tensor (the same memory, shape and strides) are tied."""

    name: str
    tensor: Any
    """A dense ``torch.Tensor`` in host memory, or on the GPU that the weights are to live on, of any strides that are
    not negative."""
    kind: Kind = "parameter"
    """``attribute``: a tensor that hangs on a module without being registered as parameter or buffer."""
    persistent: bool = True
    """Of a buffer: whether it is in the module's ``state_dict``."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """The state that an engine ended up with on this rank. It is copied out, and then forgotten."""

    module: Any = None
    """A ``torch.nn.Module``: all its parameters and buffers under all their names, in the module's order."""
    tensors: Sequence[NamedTensor] = ()
    """Further tensors, or all of them where there is no module; their order decides their places."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    """Scalars and flags that loading or post-processing left outside tensors, and that an engine which attaches has
    to have. Only what the adapter knows by name: an allow-list, never whatever is found."""
    fill: Callable[[], Built] | None = None
    """Where tensors have their final form before weights are loaded, an adapter may give them unfilled, with what loads
    into them: peak memory is then the state once and not twice. By the time it is called every tensor's ``data`` is its
    place in the segment; where that is a GPU's, tensors are where the adapter left them, and are copied after. It
    returns the state as it is then, under the same names and in the same forms; a tensor that has left its place is
    copied to it."""


@runtime_checkable
class EngineAdapter(Protocol):
    """An engine, as far as its weights go. Both methods may import the engine, and are called in processes that end
    soon after: the worker's and the key's on the daemon's side, the engine's own or a command's on the client's.
    """

    @property
    def name(self) -> str:
        """The engine's, the entry point's, and the layout's: ``[a-z][a-z0-9_-]*``, and none of ours."""
        ...

    @property
    def revision(self) -> int:
        """The layout's. Bumped when the adapter's own code gives another name, byte, order or scalar than before."""
        ...

    def key(self, request: EngineRequest) -> Mapping[str, Any]:
        """Everything besides ``config.json``, the sizes and the rank that changes a byte or a shape of the state:
        engine and version, stage (``before`` or ``after`` post-processing), torch's version, the dtype after casts,
        the backend, instruction set or compute capability where bytes depend on it, environment switches, and those
        of ``arguments`` that matter, each as the value it stands for and not as it was spelled.

        Computed before anything is loaded, without reading a weight, and equal in the daemon's and the client's
        process if and only if the states are. JSON values; at most 64 names. A value that differs is shown to people
        by its name. Raises InvalidOption for arguments that cannot be used.
        """
        ...

    def build(self, request: EngineRequest, progress: Progress) -> Built:
        """Build the state of this rank with the engine's own loader, in this process, without a peer group. Blocks.

        May use any memory and any number of threads, starts no process that outlives it, and writes nothing to the
        checkpoint. A state that cannot be shared (an opaque handle instead of a parameter) is refused by name with
        UnsupportedModel. Whatever else it raises is reported with its own text and not tried again, but for
        MemoryError and what torch raises for memory.
        """
        ...


def find_adapter(name: str) -> EngineAdapter:
    """The adapter of the engine ``name``, imported. Raises InvalidOption where there is none, or more than one;
    EngineFailed where it cannot be imported, or is no adapter.
    """
    entry = _entry_point(name)
    try:
        adapter = entry.load()
    except (Exception, SystemExit) as error:  # a module that takes itself for a program exits
        raise _failed(f"the adapter of engine {name} cannot be imported", error, where=entry.value) from error
    if not isinstance(adapter, EngineAdapter) or isinstance(adapter, type):
        raise EngineFailed(
            f"the entry point of engine {name} is no adapter",
            expected="an object with name, revision, key and build",
            found=type(adapter).__name__,
            where=entry.value,
        )
    if adapter.name != name or type(adapter.revision) is not int:
        raise EngineFailed(
            f"the adapter of engine {name} does not say what it is",
            expected=f"name {name!r} and a number as revision",
            found=f"{adapter.name!r} and {adapter.revision!r}",
            where=entry.value,
        )
    return adapter


def _entry_point(name: str) -> EntryPoint:
    installed = entry_points(group=ENTRY_POINTS)
    named = {entry.value: entry for entry in installed if entry.name == name}
    if name in LAYOUT_REVISIONS or len(named) != 1:
        known = ", ".join(sorted(set(installed.names) - LAYOUT_REVISIONS.keys()))
        raise InvalidOption(
            "there is no such engine" if name in LAYOUT_REVISIONS or not named else "two packages have this engine",
            expected=f"one of those installed in the daemon's own environment: {known or 'none'}",
            found=f"{shown(name)}{' in ' + ', '.join(sorted(named)) if named else ''}",
            next_step=f"install beside weightcached what has its adapter (entry-point group {ENTRY_POINTS})",
        )
    return next(iter(named.values()))


def engine_key(name: str, request: EngineRequest) -> EngineKey:
    """The key of the engine ``name`` for ``request``. Imports its adapter, and perhaps the engine. Raises InvalidOption
    for arguments that cannot be used, EngineFailed with what else the adapter raised.
    """
    adapter = find_adapter(name)
    said = _Overheard(sys.stderr or io.StringIO())
    try:
        with redirect_stderr(cast(TextIO, said)):
            entries = adapter.key(request)
    except WeightCacheError:
        raise
    except SystemExit as error:  # a command line's parser prints why, and exits
        raise EngineFailed(
            f"engine {name} does not say what its key is",
            found=f"it exits ({error}), and says: {said.last_line}" if said.last_line else f"it exits ({error})",
            next_step="look at the arguments after `--`",
        ) from error
    except Exception as error:
        raise _failed(f"engine {name} does not say what its key is", error) from error
    return EngineKey.of(name, adapter.revision, entries)


class _Overheard:
    """A stream that passes everything on, and remembers its last line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.last_line = ""

    def write(self, text: str) -> int:
        lines = [line for line in text.splitlines() if line.strip()]
        self.last_line = lines[-1].strip() if lines else self.last_line
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _failed(message: str, error: BaseException, *, where: object = None) -> EngineFailed:
    return EngineFailed(message, found=f"{type(error).__name__}: {error}", where=where)
