"""The config half of a key: everything besides the weights' bytes that can change a byte or a shape of the result.

Owns :class:`CacheConfig`, its fingerprint, and how two configs are compared field by field. It is computed from inputs
(options and ``config.json``) before anything is loaded, and nothing that loading does can change it: the values are
frozen when it is made. The content half of a key is ``content.py``.

:class:`Provenance` is what people want to know about where weights came from; it never decides anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgpack
from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from weightcached.protocol.canonical import canonical_bytes, canonical_sha256
from weightcached.protocol.engine_key import EngineKey
from weightcached.protocol.errors import ABSENT, FieldDifference, InvalidOption, ModelConfigError
from weightcached.protocol.frozen import Frozen, FrozenJson
from weightcached.protocol.memory.chosen import CPU, DEVICE_PATTERN, GPU_PREFIX, Memory
from weightcached.protocol.quantization import Quantization
from weightcached.protocol.regular_files import open_regular
from weightcached.protocol.text import shown

SCHEMA_VERSION = 1

LAYOUT_REVISIONS: Mapping[str, int] = MappingProxyType({"hf": 1, "fused": 1})
"""Revision of the rules that make each layout. A rule that changes a byte, a name or an offset bumps its number.

It carries the engine's version too: names, and which stages have what, are those of vLLM 0.32. A release that follows a
version with other names has another revision, so that a client of the one never maps what the other made.
"""

MODEL_CONFIG_MAX_BYTES = 16 * 1024 * 1024
MODEL_CONFIG_MAX_DEPTH = 64
MODEL_CONFIG_KEYS_MAX = 2000
MODEL_CONFIG_KEY_MAX_CHARACTERS = 1000
"""Keys travel, with a prefix, as names of at most 1024 characters."""
TOKENIZER_MAX_BYTES = 256 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
ABBREVIATE_OVER_BYTES = 1024

# Fields of config.json that no loader looks at. Every other field is part of the key: a needless miss costs one load,
# a needless hit serves wrong weights.
_IRRELEVANT_TO_WEIGHTS = frozenset(
    {"_name_or_path", "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
)
_RANK_ENTRIES = frozenset({"parallel.tp_rank", "parallel.pp_rank", "parallel.ep_rank", "parallel.dp_rank"})
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


class Parallel(Frozen):
    """Parallel sizes and this rank's place in each. Ranks are never defaulted where the size is over one.

    Expert parallelism is over all devices of a pipeline stage: ``ep_size`` is TP size × data-parallel replicas, and
    ``ep_rank`` is replica × TP size + ``tp_rank``. With it ranks hold whole experts; without, slices of each.
    """

    tp_size: int = Field(ge=1)
    tp_rank: int = Field(ge=0)
    pp_size: int = Field(default=1, ge=1)
    pp_rank: int = Field(default=0, ge=0)
    ep_size: int = Field(default=1, ge=1)
    ep_rank: int = Field(default=0, ge=0)
    dp_size: int = Field(default=1, ge=1)
    dp_rank: int = Field(default=0, ge=0)
    expert_placement: Literal["linear", "round_robin"] = "linear"

    @model_validator(mode="after")
    def _ranks_below_sizes(self) -> Parallel:
        for kind in ("tp", "pp", "ep", "dp"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if rank >= size:
                raise ValueError(f"{kind}_rank is {rank}, but {kind}_size is {size}: ranks count from 0")
        return self


class CacheConfig(Frozen):
    """The whole configuration of one rank's shard. Equal configs and equal content mean equal resident bytes."""

    schema_version: Literal[1] = 1
    architecture: str
    layout: str
    layout_revision: int
    parallel: Parallel
    model: FrozenJson
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantization: Quantization = Quantization()
    memory: Memory = "host"
    device: str = Field(default=CPU, pattern=DEVICE_PATTERN)
    """``cpu``, or the GPU by its UUID: the very one, so that no daemon is taken for that of another GPU."""
    engine: FrozenJson | None = None
    """The entries of the key of the engine that made the layout, whose name is ``layout``; null for layouts of ours."""

    @model_validator(mode="after")
    def _of_one_maker(self) -> CacheConfig:
        if (self.engine is None) != (self.layout in LAYOUT_REVISIONS):
            raise ValueError(f"layout {self.layout!r} {'without' if self.engine is None else 'with'} an engine's key")
        return self

    @model_validator(mode="after")
    def _in_memory_of_its_device(self) -> CacheConfig:
        if (self.memory == "host") != (self.device == CPU):
            raise ValueError(f"memory kind {self.memory!r} is not on device {self.device!r}")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Layouts of ours have no such field: what earlier releases made keeps its fingerprint, and is adopted."""
        return {name: value for name, value in dump(self).items() if value is not None or name != "engine"}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the canonical encoding of every field."""
        return canonical_sha256(self.model_dump())

    @cached_property
    def rankless_fingerprint(self) -> str:
        """The fingerprint without the ranks, and without which GPU it is: equal on all ranks of one model state."""
        entries = {name: value for name, value in self.entries().items() if name not in _RANK_ENTRIES}
        if self.device != CPU:
            entries["device"] = GPU_PREFIX
        return canonical_sha256(entries)

    def entries(self) -> dict[str, Any]:
        """Field path → full JSON-like value, one level into each field that is a map."""
        flat: dict[str, Any] = {}
        for name, value in self.model_dump().items():
            if isinstance(value, dict):
                flat.update({f"{name}.{key}": item for key, item in value.items()})
            else:
                flat[name] = value
        return flat


def abbreviated(entries: Mapping[str, Any]) -> dict[str, Any]:
    """``entries`` as they travel: a value whose canonical encoding is over 1 KiB is replaced by its digest."""
    return {name: _abbreviated_value(value) for name, value in entries.items()}


def _abbreviated_value(value: Any) -> Any:
    encoded = canonical_bytes(value)
    imitates = isinstance(value, Mapping) and "$sha256" in value  # would pass for the abbreviation of another value
    if len(encoded) <= ABBREVIATE_OVER_BYTES and not imitates:
        return value
    return {"$sha256": hashlib.sha256(encoded).hexdigest(), "$nbytes": len(encoded)}


def _is_short(value: Any) -> bool:
    """Whether ``value`` can be within the limit, asked fast: msgpack is hardly longer than the canonical encoding."""
    try:
        return len(msgpack.packb(value)) <= 2 * ABBREVIATE_OVER_BYTES
    except (ValueError, OverflowError):  # text or integers that no frame can carry: only our own values can be such
        return True


def differing_entries(ours: Mapping[str, Any], theirs_abbreviated: Mapping[str, Any]) -> list[str]:
    """Names of all entries that differ or stand on one side only, sorted. ``ours`` is full, the other side abbreviated.

    ``theirs_abbreviated`` is a peer's word: a value that was not abbreviated as it should differs, and costs little.
    """
    mine = abbreviated(ours)
    names = mine.keys() | theirs_abbreviated.keys()
    return sorted(
        name
        for name in names
        if name not in mine
        or name not in theirs_abbreviated
        or not _is_short(theirs_abbreviated[name])
        or canonical_bytes(mine[name]) != canonical_bytes(theirs_abbreviated[name])
    )


def explain_differences(daemon: Mapping[str, Any], client: Mapping[str, Any]) -> tuple[FieldDifference, ...]:
    """Every leaf that differs, as dotted paths with both values; a side that lacks it has ``ABSENT``."""
    return tuple(_leaf_differences("", daemon, client))


def _leaf_differences(path: str, daemon: Any, client: Any) -> Iterator[FieldDifference]:
    if isinstance(daemon, Mapping) and isinstance(client, Mapping):
        for key in sorted(daemon.keys() | client.keys()):
            inner = f"{path}.{key}" if path else key
            yield from _leaf_differences(inner, daemon.get(key, ABSENT), client.get(key, ABSENT))
    elif daemon is ABSENT or client is ABSENT or canonical_bytes(daemon) != canonical_bytes(client):
        yield FieldDifference(path, daemon, client)


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint directory. Raises ModelConfigError saying what is wrong with it."""
    path = model_dir / "config.json"
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(MODEL_CONFIG_MAX_BYTES + 1)
    except OSError as error:
        raise ModelConfigError(
            "cannot read the checkpoint's config.json",
            found=error.strerror,
            where=path,
            next_step="name a directory that holds config.json and *.safetensors",
        ) from error
    if len(data) > MODEL_CONFIG_MAX_BYTES:
        raise ModelConfigError(
            "config.json is too large", expected=f"at most {MODEL_CONFIG_MAX_BYTES} bytes", where=path
        )
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError("config.json is not JSON", found=str(error), where=path) from error
    if not isinstance(config, dict):
        raise ModelConfigError(
            "config.json is not an object", expected="a JSON object", found=type(config).__name__, where=path
        )
    if _depth(config) > MODEL_CONFIG_MAX_DEPTH:
        raise ModelConfigError(
            "config.json is nested too deeply", expected=f"at most {MODEL_CONFIG_MAX_DEPTH} levels", where=path
        )
    _require_sayable(config, path)
    return config


def _require_sayable(config: Mapping[str, Any], where: Path) -> None:
    """What JSON can say and no message can is refused here, by its name, and not in the middle of an attach."""
    if len(config) > MODEL_CONFIG_KEYS_MAX or max(map(len, config), default=0) > MODEL_CONFIG_KEY_MAX_CHARACTERS:
        raise ModelConfigError(
            "config.json has too many keys, or too long ones",
            expected=f"at most {MODEL_CONFIG_KEYS_MAX} of at most {MODEL_CONFIG_KEY_MAX_CHARACTERS} characters",
            found=f"{len(config)} keys, the longest of {max(map(len, config))} characters",
            where=where,
        )
    try:
        msgpack.packb(config)
    except (ValueError, OverflowError) as error:
        raise ModelConfigError(
            "config.json holds a value that cannot be used",
            expected="text in UTF-8, and integers of 64 bits",
            found=f"{type(error).__name__}: {error}"[:200],
            where=where,
        ) from error


def _depth(value: Any) -> int:
    """How many containers lie inside each other, level by level."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def _architecture(config: Mapping[str, Any], where: Path) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or type(names[0]) is not str or len(names[0]) > 200:
        raise ModelConfigError(
            "config.json does not name one architecture",
            expected='"architectures": ["<one name>"]',
            found=shown(names),
            where=where,
        )
    return names[0]


def _layout_revision(layout: str, quantization: str, engine: EngineKey | None) -> int:
    if engine is None:
        if layout not in LAYOUT_REVISIONS:
            raise InvalidOption(
                "unknown layout",
                expected=f"{' or '.join(LAYOUT_REVISIONS)}, or an engine's name with its key",
                found=layout,
            )
        return LAYOUT_REVISIONS[layout]
    if layout != engine.name:
        raise InvalidOption("the layout is not that of the engine's key", expected=engine.name, found=layout)
    if quantization != "none":
        raise InvalidOption(
            "layouts of engines are quantized by the engine",
            expected=f"quantization none, and {engine.name}'s own arguments",
            found=quantization,
        )
    return engine.revision


def build_config(
    model_dir: Path,
    *,
    layout: str,
    tp_size: int,
    tp_rank: int,
    pp_size: int = 1,
    pp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    dp_size: int = 1,
    dp_rank: int = 0,
    expert_placement: str = "linear",
    dtype: str = "auto",
    quantization: str = "none",
    engine: EngineKey | None = None,
    memory: Memory = "host",
    device: str = CPU,
) -> CacheConfig:
    """The config for one rank of the checkpoint in ``model_dir``. Reads ``config.json`` and no weight.

    Sizes, ranks and placement are those of `Parallel`; ``engine`` is the key of the engine whose name is ``layout``;
    ``memory`` and ``device`` are as ``memory/chosen.py`` gives them.
    Raises InvalidOption for options that cannot be, ModelConfigError for a bad ``config.json``.
    """
    model = read_model_config(model_dir)
    revision = _layout_revision(layout, quantization, engine)
    try:
        return CacheConfig(
            architecture=_architecture(model, model_dir / "config.json"),
            layout=layout,
            layout_revision=revision,
            parallel=Parallel(
                tp_size=tp_size,
                tp_rank=tp_rank,
                pp_size=pp_size,
                pp_rank=pp_rank,
                ep_size=ep_size,
                ep_rank=ep_rank,
                dp_size=dp_size,
                dp_rank=dp_rank,
                expert_placement=expert_placement,  # type: ignore[arg-type]  # validated by the model
            ),
            model={key: value for key, value in model.items() if key not in _IRRELEVANT_TO_WEIGHTS},
            dtype=dtype,  # type: ignore[arg-type]  # validated by the model
            quantization=Quantization.named(quantization),
            memory=memory,
            device=device,
            engine=None if engine is None else engine.entries,
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "parallel"
        raise InvalidOption(f"unusable {field}", expected=first["msg"], found=shown(first["input"])) from error


class Provenance(Frozen):
    """Where weights came from, for people. The client warns when the daemon's differs; nothing is refused."""

    path: str = Field(max_length=4096)
    host: str = Field(max_length=255)
    revision: str | None = Field(default=None, max_length=255)
    tokenizer_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


def provenance_of(model_dir: Path) -> Provenance:
    """Describe ``model_dir``: real path, host, revision where it is a hub snapshot's path, tokenizer digest.

    A tokenizer file that cannot be read is as good as none. Blocks while they are read.
    """
    real = Path(os.path.realpath(model_dir))
    return Provenance(
        path=_shown_path(os.fspath(real), 4096),
        host=socket.gethostname(),
        revision=_shown_path(real.name, 255) if real.parent.name == "snapshots" else None,
        tokenizer_sha256=_tokenizer_sha256(real),
    )


def _shown_path(text: str, characters_max: int) -> str:
    return os.fsencode(text).decode("utf-8", "backslashreplace")[:characters_max]


def _tokenizer_sha256(directory: Path) -> str | None:
    digest, found = hashlib.sha256(), False
    for name in _TOKENIZER_FILES:
        try:
            with open(directory / name, "rb", opener=open_regular) as file:
                nbytes = os.fstat(file.fileno()).st_size
                digest.update(f"{name}\0{nbytes}\0".encode())
                left = nbytes if nbytes <= TOKENIZER_MAX_BYTES else 0  # larger is no tokenizer: told by its size
                while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
                    digest.update(piece)
                    left -= len(piece)
        except OSError:
            continue
        found = True
    return digest.hexdigest() if found else None
