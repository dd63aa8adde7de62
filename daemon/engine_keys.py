"""The key of the engine that makes a layout: asked of a process that imports the engine, and not asked twice for one.

Owns that process, and the receipt of what a key is computed from (:func:`inputs_of`), by which a keeper that is started
again after a crash knows that the key of what it adopts is still the same: importing an engine takes seconds, and
nothing else about adopting does.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from weightcached.daemon.children import Child, parent_arguments
from weightcached.daemon.options import ServeOptions
from weightcached.protocol.engine_key import EngineKey
from weightcached.protocol.errors import EngineFailed

KEY_MODULE = "weightcached.loader.engines.key"

_OF_THE_MANAGER = re.compile(
    "_|INVOCATION_ID|JOURNAL_STREAM|LISTEN_.*|MAINPID|MEMORY_PRESSURE_.*|NOTIFY_SOCKET|SHLVL|SYSTEMD_.*|WATCHDOG_.*"
)
"""Variables that each life of a keeper has anew; no engine looks at them."""


async def ask_for_key(engine: str, options: ServeOptions, model_dir: Path) -> EngineKey:
    """The key that ``engine`` says it has, for what the options ask for. Raises what its adapter raises, EngineFailed
    where its code ends the process.
    """
    arguments = ["--engine", engine, "--request", json.dumps(_request(options, model_dir)), *parent_arguments()]
    child = await Child.start(f"key of engine {engine}", KEY_MODULE, arguments, answers=True)
    try:
        answer = await child.answer(or_else=EngineFailed)
    finally:
        await child.end()
    return EngineKey.of(engine, answer["revision"], answer["entries"])


def _request(options: ServeOptions, model_dir: Path) -> dict[str, Any]:
    return {
        "model_dir": os.fspath(model_dir),
        "parallel": options.parallel.model_dump(),
        "dtype": options.dtype,
        "device": options.device,
        "arguments": options.engine_arguments,
    }


def inputs_of(options: ServeOptions, model_dir: Path) -> str | None:
    """SHA-256 over all that a key may be computed from: what is asked for, the model's JSON files by their stat, this
    interpreter, the packages that it sees, the environment. ``None`` where the model's directory cannot be read.

    Packages count by the directories that they are installed in: an installation changes these. A change inside of an
    installed package is seen only when the key is asked for, by the worker or after the next change that counts.
    """
    try:
        files = sorted((entry.name, _stat(entry.stat())) for entry in os.scandir(model_dir) if _is_json(entry))
    except OSError:
        return None
    environment = {name: text for name, text in os.environ.items() if not _OF_THE_MANAGER.fullmatch(name)}
    interpreter = [sys.executable, sys.version, [(path, _stat_of(path)) for path in sys.path]]
    inputs = [options.engine, _request(options, model_dir), files, interpreter, sorted(environment.items())]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _is_json(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".json")


def _stat(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _stat_of(path: str) -> tuple[int, ...] | None:
    try:
        return _stat(os.stat(path))
    except OSError:
        return None
