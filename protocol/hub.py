"""Owns one question: which directory does ``--model`` mean? A directory is itself; a hub id is resolved and downloaded.

``huggingface_hub`` is imported only when there is a hub id to resolve. The keeper never imports it at all: it runs
``python -m weightcached.protocol.hub MODEL``, which prints one line, ``{"path": …}`` or ``{"error": {…}}``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import sys
from pathlib import Path

from weightcached.protocol.content import weight_files
from weightcached.protocol.errors import CheckpointError, InvalidOption, ModelConfigError, WeightCacheError
from weightcached.protocol.processes import die_with_parent

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)

# What an engine may need from a repository, and never anything that can run. Files in folders (`original/`, `onnx/`)
# and consolidated copies are other forms of the same weights.
WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
UNWANTED = ("*/*", "consolidated*.safetensors")


def resolve(model: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The checkpoint's directory: ``model`` itself when it is one, else the snapshot of that hub id.

    The local hub cache answers first, without a look at the network, if it holds ``config.json`` and all weights; else
    they are downloaded (blocks, as long as that takes), unless ``HF_HUB_OFFLINE`` forbids it. Raises
    :class:`InvalidOption` when ``model`` is neither, :class:`CheckpointError` when the hub's files cannot be had.
    """
    path, found = Path(), "nothing there"
    try:
        path = Path(model)
        mode = os.stat(model).st_mode
    except TypeError:
        found = f"no path, but of type {type(model).__name__}"
    except (FileNotFoundError, NotADirectoryError, ValueError):
        if isinstance(model, str) and _HUB_ID.fullmatch(model):
            return _snapshot(model, revision)
    except OSError as error:
        found = str(error.strerror)
    else:
        if stat.S_ISDIR(mode):
            if revision is not None:
                raise InvalidOption("a revision belongs to a hub id, not to a directory", found=revision, where=path)
            return path
        found = "a file"
    raise InvalidOption(
        "the model is neither a directory nor a hub id",
        expected="a directory with config.json and *.safetensors, or an id such as Qwen/Qwen3-8B",
        found=found,
        where=repr(model),
    )


def _snapshot(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HFValidationError,
        HTTPError,  # the root of whichever HTTP library this release of the hub uses
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def snapshot(*, local_files_only: bool) -> Path:
        wanted, unwanted = [*WANTED], [*UNWANTED]
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=unwanted,
                local_files_only=local_files_only,
            )
        )

    partial: Path | None = None
    try:
        local = snapshot(local_files_only=True)
        if _lacks(local) is None:
            return local
    except LocalEntryNotFoundError as error:
        partial = _partial(error)
    except HFValidationError as error:
        raise InvalidOption("not a hub id, and no such directory", found=error, where=model) from error
    try:
        downloaded = snapshot(local_files_only=False)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise InvalidOption(
            "no such directory, and the hub has no such model (or shows it only to others)",
            found=str(error).partition("\n")[0],
            where=f"{model}, revision {revision or 'main'}",
            next_step="check the spelling; for a private or gated model, log in with `hf auth login`",
        ) from error
    except (OSError, HTTPError) as error:
        if partial is not None and _lacks(partial) is None:
            return partial  # what is missing there is nothing that weights need
        raise CheckpointError(
            "no such directory, and the model can be had neither from the local hub cache nor from the hub",
            expected="config.json and all weights in the local hub cache, or a hub that answers",
            found=str(error).partition("\n")[0],
            where=f"{model}, revision {revision or 'main'}",
            next_step="download it where there is a network, or unset HF_HUB_OFFLINE, or name a directory",
        ) from error
    if (lack := _lacks(downloaded)) is not None:
        raise lack
    return downloaded


def _partial(error: Exception) -> Path | None:
    """The snapshot that is there in part; only newer releases of the hub tell."""
    path = getattr(error, "snapshot_path", None)
    return None if path is None else Path(path)


def _lacks(snapshot: Path) -> CheckpointError | None:
    """Why the snapshot cannot be loaded from, or ``None``: a cache may hold only the one file somebody asked for."""
    if not (snapshot / "config.json").is_file():
        return ModelConfigError("the snapshot has no config.json", where=snapshot)
    try:
        weight_files(snapshot)
    except CheckpointError as error:
        return error
    return None


def main(argv: list[str]) -> int:
    """Prints one line of JSON, ``{"path": …}`` or ``{"error": {"code": …, "message": …, …}}``; returns 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m weightcached.protocol.hub", description="Where is a model?")
    parser.add_argument("model", metavar="MODEL", help="a directory, or a hub id")
    parser.add_argument("--revision", help="a branch, tag or commit of the hub id")
    parser.add_argument("--die-with-parent", metavar="PID", type=int, help="end when the process PID, our parent, ends")
    options = parser.parse_args(argv)
    if options.die_with_parent is not None:
        die_with_parent(options.die_with_parent)
    try:
        path = resolve(options.model, revision=options.revision)
    except WeightCacheError as error:
        print(json.dumps({"error": error.as_fields()}), flush=True)
        return 1
    print(json.dumps({"path": str(path)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
