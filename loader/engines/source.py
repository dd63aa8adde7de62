"""An engine as the source of a segment: its adapter builds this rank's state, which is then copied and digested.

Owns the order: receipts of the files, the key once more, build, copy, receipts again. Peak memory is what the engine
needs to build, then the state twice: the keeper admits the copy when the engine's own is there already. Where the
adapter gives unfilled tensors they are moved into the segment first, and the state is there once; a GPU's segment they
are copied to in any case (`onto_device.py`). Speaks to nobody; `worker.py` asks.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from weightcached.loader.destination import Target, descriptors
from weightcached.loader.engines.moving import copy_to, move, place_of
from weightcached.loader.engines.returned import require_built
from weightcached.loader.engines.state import PlacedTensor, place_state
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.content import Receipts, open_weights, take_receipts, weight_files
from weightcached.protocol.engine_key import EngineKey
from weightcached.protocol.engines import Built, EngineRequest, Progress, engine_key, find_adapter
from weightcached.protocol.errors import EngineFailed, InsufficientMemory, WeightCacheError
from weightcached.protocol.manifest import ManifestMeta, NameAccounting, Row, encode_manifest
from weightcached.protocol.memory import host
from weightcached.protocol.memory.chosen import CPU, GPU_PREFIX

COPY_THREADS_MAX = 4
PROGRESS_EVERY_S = 0.1


class EngineState:
    """What an engine built, while it lies in this process. Made by :func:`build_state`."""

    def __init__(
        self,
        config: CacheConfig,
        built: Built,
        *,
        receipts: Receipts,
        receipts_now: Callable[[], Receipts],
        files_nbytes: int,
        build_s: float,
    ) -> None:
        """On a GPU the driver is asked which it is here; raises DeviceAbsent, and what ``place_state`` raises."""
        self._config = config
        self._built = built
        self._seconds = {"build": build_s}
        self._state = place_state(built, gpu=_number_of(config.device))
        self.receipts = receipts
        self._receipts_now = receipts_now
        self.files_nbytes = files_nbytes
        """Of the checkpoint's weights. The engine reads them by itself, and perhaps not all of them."""

    @property
    def segment_nbytes(self) -> int:
        return self._state.segment_nbytes

    @property
    def content_nbytes(self) -> int:
        """Bytes of all tensors, each place once."""
        return sum(one.nbytes for one in self._state.placed if one.alias_of is None)

    def copy(
        self, segment: Target, progress: Callable[[int, int], None]
    ) -> tuple[Callable[..., bytes], dict[str, float]]:
        """Copy every tensor to its place in ``segment``, and digest what lies there; in host memory, what can be filled
        is filled there. Blocks.

        Returns what encodes the manifest, and the seconds of each stage. Nothing is mapped afterwards: of tensors that
        have been moved nothing may be read any more. Raises CheckpointChanged, and what the engine's filling raises, as
        :func:`build_state` does.
        """
        seconds = dict(self._seconds)
        fds = descriptors(segment)
        if fds is not None:
            (fd,) = fds
            with host.map_shared(fd, nbytes=self.segment_nbytes) as mapping:
                self._fill(seconds, into=mapping.view())
                with _timed(seconds, "copy"):
                    digests = _copied(self._places, mapping.view(), progress)
        else:
            self._fill(seconds, into=None)
            with _timed(seconds, "copy"):
                digests = _copied_onto(self._places, segment, progress)
        # From the paths anew: a file that was put in another's place is seen too, and not only one that was written to.
        self.receipts.require_same(self._receipts_now())
        rows = tuple(_row(one, digests[one.alias_of or one.name]) for one in self._state.placed)
        return partial(self._encode, rows, seconds), seconds

    @property
    def _places(self) -> list[PlacedTensor]:
        return [one for one in self._state.placed if one.alias_of is None]

    def _fill(self, seconds: dict[str, float], *, into: memoryview | None) -> None:
        """Have the engine load, where it has left that to be done: into the segment, or where its tensors are."""
        fill = self._built.fill
        if fill is None:
            return
        with _timed(seconds, "fill"):
            if into is not None:
                move(self._state, into)
            with engine_errors(self._config.layout):
                returned = fill()
        self._built = require_built(returned, what=f"what fills the state of engine {self._config.layout}")
        self._state = self._state.with_tensors_of(self._built)

    def _encode(
        self,
        rows: Sequence[Row],
        seconds: dict[str, float],
        *,
        generation: str,
        version: str,
        receipts_version: str,
        digest: str | None,
    ) -> bytes:
        meta = ManifestMeta(
            generation=generation,
            version=version,
            receipts_version=receipts_version,
            fingerprint=self._config.fingerprint,
            config=self._config.model_dump(),
            digest=digest,
            segments_nbytes=(self.segment_nbytes,),
            bytes_read=self.files_nbytes,
            bytes_kept=self.content_nbytes,
            seconds=seconds,
            scalars=dict(self._built.scalars),
        )
        return encode_manifest(meta, rows, NameAccounting())


def build_state(
    model_dir: str,
    config: CacheConfig,
    arguments: Sequence[str],
    *,
    also_trusted: Collection[str],
    progress: Progress,
) -> EngineState:
    """Have the engine that ``config.layout`` names build its state. That the files were the same all the time is seen
    when it has been copied.

    Raises EngineFailed with the engine's own words, InsufficientMemory, UnsupportedModel naming what cannot be shared,
    and what opening the checkpoint raises.
    """
    request = EngineRequest(
        model_dir=Path(model_dir),
        parallel=config.parallel,
        dtype=config.dtype,
        device=config.device,
        arguments=tuple(arguments),
    )
    before, files_nbytes = _receipts(model_dir, also_trusted)
    _require_same_key(engine_key(config.layout, request), config)
    started_s = time.perf_counter()
    with engine_errors(config.layout):
        returned = find_adapter(config.layout).build(request, progress)
    return EngineState(
        config,
        require_built(returned, what=f"the adapter of engine {config.layout}"),
        receipts=before,
        receipts_now=lambda: _receipts(model_dir, also_trusted)[0],
        files_nbytes=files_nbytes,
        build_s=time.perf_counter() - started_s,
    )


def _number_of(device: str) -> int | None:
    """What this process, torch included, calls a config's device; None for host memory."""
    if device == CPU:
        return None
    from weightcached.protocol.memory.cuda import devices

    return devices.find(device.removeprefix(GPU_PREFIX)).ordinal


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started_s = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - started_s


def _receipts(model_dir: str, also_trusted: Collection[str]) -> tuple[Receipts, int]:
    with open_weights(weight_files(model_dir)) as weights:
        nbytes = sum(os.fstat(fd).st_size for fd in weights.values())
        return take_receipts(weights, also_trusted=also_trusted), nbytes


def _require_same_key(found: EngineKey, config: CacheConfig) -> None:
    """The key was computed by another process, a moment or a failed attempt ago."""
    asked = EngineKey(config.layout, config.layout_revision, config.engine or {})
    if found == asked:
        return
    names = sorted(
        name
        for name in found.entries.keys() | asked.entries.keys()
        if found.entries.get(name) != asked.entries.get(name)
    )
    raise EngineFailed(
        f"engine {config.layout} has another key than when this daemon started",
        expected=f"revision {asked.revision}, {', '.join(f'{name} {asked.entries.get(name)!r}' for name in names)}",
        found=f"revision {found.revision}, {', '.join(f'{name} {found.entries.get(name)!r}' for name in names)}",
        next_step="restart the daemon: the engine, or its environment, was changed beside it",
    )


@contextmanager
def engine_errors(name: str) -> Iterator[None]:
    """Whatever the engine raises in the block, an interrupt of its own too, becomes an error of ours with its words;
    its traceback is logged.
    """
    try:
        yield
    except WeightCacheError:
        raise
    except BaseException as error:
        traceback.print_exception(error)
        words = f"{type(error).__name__}: {error}"
        if _is_of_memory(error):
            raise InsufficientMemory(
                f"engine {name} has no memory to build its state",
                found=words,
                next_step="free memory on this host, or raise the daemon's limits (control group, ulimit -v)",
            ) from error
        raise EngineFailed(
            f"engine {name} could not build its state",
            found=words,
            next_step="see the daemon's log for the traceback; try the same arguments with the engine alone",
        ) from error


def _is_of_memory(error: BaseException) -> bool:
    """torch has a class for devices' memory; for the host's it has a RuntimeError that says so."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "out of memory", "Cannot allocate memory")
    )


def _copied_onto(
    places: Sequence[PlacedTensor], segment: Target, progress: Callable[[int, int], None]
) -> dict[str, bytes]:
    from weightcached.loader.device import DeviceSegments
    from weightcached.loader.engines.onto_device import copy_onto

    if not isinstance(segment, DeviceSegments):
        raise TypeError(f"nobody has said how to copy an engine's state to {segment}")
    return copy_onto(places, segment, progress)


def _copied(
    places: Sequence[PlacedTensor], segment: memoryview, progress: Callable[[int, int], None]
) -> dict[str, bytes]:
    """Copy, with a few threads; name → XXH3-128 of the bytes that lie there then."""
    total = sum(one.nbytes for one in places)

    def copy(one: PlacedTensor) -> bytes:
        if one.nbytes:
            copy_to(place_of(one, segment), one.tensor)
        hasher = xxhash.xxh3_128()
        hasher.update(segment[one.offset : one.offset + one.nbytes])
        return hasher.digest()

    digests: dict[str, bytes] = {}
    done, told_s = 0, 0.0
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), COPY_THREADS_MAX)) as threads:
        for one, digest in zip(places, threads.map(copy, places), strict=True):
            digests[one.name] = digest
            done += one.nbytes
            if done == total or time.monotonic() >= told_s + PROGRESS_EVERY_S:
                told_s = time.monotonic()
                progress(done, total)
    return digests


def _row(one: PlacedTensor, digest: bytes) -> Row:
    tensor: Any = one.tensor
    return Row(
        name=one.name,
        segment=0,
        offset=one.offset,
        nbytes=one.nbytes,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=one.dtype,
        digest=digest,
        kind=one.kind,
        persistent=one.persistent,
        alias_of=one.alias_of,
    )
