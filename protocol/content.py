"""Owns the identity of checkpoint *content*: which files are the weights, and what stands for their bytes.

- :func:`weight_files` names the files (the index is the authority), :func:`open_weights` opens them;
- :func:`take_receipts` (from receipts.py) takes stat evidence of exactly those descriptors;
- :func:`version_of` makes the version that ranks compare.

It reads no weight (digests.py does), and does not look into safetensors headers (the loader does). Anybody may call it:
keeper, worker, client.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from weightcached.protocol.canonical import canonical_sha256
from weightcached.protocol.errors import (
    CheckpointChanged,
    CheckpointError,
    IndexFileError,
    MissingShard,
    PickleRefused,
)
from weightcached.protocol.index_file import INDEX_LIMIT_BYTES, INDEX_NAME, PICKLE_SUFFIXES, parse_index
from weightcached.protocol.receipts import Receipt, Receipts, take_receipts
from weightcached.protocol.regular_files import NotRegularError, open_regular

__all__ = [
    "SINGLE_NAME",
    "OpenWeights",
    "Receipt",
    "Receipts",
    "WeightFiles",
    "open_weights",
    "take_receipts",
    "version_of",
    "weight_files",
    "weights_visible",
]

SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class WeightFiles:
    """The files that are a checkpoint's weights. Nothing is open; the files were there when it was made."""

    directory: Path
    names: tuple[str, ...]
    """Plain file names of the weights, sorted; the index is not among them."""
    index: str | None
    """The index's file name, where there is one."""
    weight_map: Mapping[str, str] | None
    """Tensor → file name, read-only, as the index says; ``None`` without an index."""
    ignored: dict[str, str]
    """Files that look like weights and are not used → why."""
    index_stat: tuple[int, ...] | None = field(default=None, repr=False)
    """What the index was when it was parsed, so that opening can notice that another has taken its place."""

    def locate(self, error: BaseException | None) -> None:
        """Have an error about one of these files say which directory it is in: who works at them knows their names."""
        if isinstance(error, CheckpointError) and isinstance(error.where, str) and error.where.startswith(self._known):
            error.where = f"{self.directory}/{error.where}"

    @property
    def _known(self) -> tuple[str, ...]:
        return self.names if self.index is None else (*self.names, self.index)


def weight_files(model_dir: str | os.PathLike[str]) -> WeightFiles:
    """Decides which files are the weights of ``model_dir``; reads directory and index only.

    With an index: exactly the files it names. Without: ``model.safetensors``, else the only ``*.safetensors`` there is.
    Links are followed (hub caches are links). Raises :class:`MissingShard`, :class:`IndexFileError` (bad index, or
    several files to choose from), :class:`PickleRefused`, or :class:`CheckpointError` (no readable directory).
    """
    directory = Path(model_dir)
    present = _list(directory)
    if INDEX_NAME in present:
        raw, index_stat = _read_index(directory / INDEX_NAME)
        weight_map = parse_index(raw, where=str(directory / INDEX_NAME))
        names = tuple(sorted(set(weight_map.values())))
        _require_present(directory, names, present)
        ignored = _ignored(present, names, f"{INDEX_NAME} does not name it")
        return WeightFiles(directory, names, INDEX_NAME, weight_map, ignored, index_stat)
    candidates = [name for name in present if name.endswith(".safetensors")]
    name = SINGLE_NAME if SINGLE_NAME in candidates else _only(directory, candidates, present)
    _require_present(directory, (name,), present)
    return WeightFiles(directory, (name,), None, None, _ignored(present, (name,), f"{name} is the whole checkpoint"))


class OpenWeights(Mapping[str, int]):
    """File name → read-only descriptor of each weight file and the index; owns them until closed.

    A context manager; errors about the files that leave it say which directory they are in.
    """

    def __init__(self, files: WeightFiles) -> None:
        self.files = files
        self._fds: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self._fds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fds)

    def __len__(self) -> int:
        return len(self._fds)

    def __enter__(self) -> OpenWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.files.locate(error)
        self.close()

    def close(self) -> None:
        """Closes every descriptor; what was mapped or read stays. Safe to call again."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _open(self) -> None:
        for name in self.files.names:
            self._fds[name] = _open(self.files.directory / name)
        if self.files.index is not None:
            fd = self._fds[self.files.index] = _open(self.files.directory / self.files.index)
            if _moment(os.fstat(fd)) != self.files.index_stat:
                raise CheckpointChanged(
                    "the index changed after it was read",
                    where=self.files.directory / self.files.index,
                    next_step="let whoever writes the checkpoint finish, then start again",
                )


def open_weights(files: WeightFiles) -> OpenWeights:
    """Opens every file of ``files`` (and its index): regular files only, read-only, close-on-exec.

    The caller owns the result and closes it; when this raises (:class:`MissingShard`, :class:`CheckpointChanged`,
    :class:`CheckpointError`) nothing stays open.
    """
    weights = OpenWeights(files)
    try:
        weights._open()
    except BaseException:
        weights.close()
        raise
    return weights


def version_of(rankless_fingerprint: str, *, digest: str | None, receipts: str | None) -> str:
    """The version of a checkpoint under a config: ``digest:<hex>``, or ``receipts:<hex>`` while no digest is known.

    Equal on all ranks of one model state (on one host only, in the case of receipts). The word before the colon keeps
    the two from ever being taken for each other. Arguments are hex; at least one of digest and receipts is given.
    """
    kind, content = ("digest", digest) if digest is not None else ("receipts", receipts)
    if content is None:
        raise ValueError("a version needs a digest or receipts")
    return f"{kind}:{canonical_sha256({'version': 1, 'config': rankless_fingerprint, kind: content})}"


def weights_visible(model_dir: str | os.PathLike[str]) -> bool:
    """Whether the directory has any weight file at all: without one, only a stated digest can name the content."""
    return any(name.endswith((".safetensors", *PICKLE_SUFFIXES)) for name in _list(Path(model_dir)))


def _list(directory: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(directory))
    except OSError as error:
        raise CheckpointError(
            "the model directory cannot be read",
            expected="a directory with config.json and *.safetensors",
            found=error.strerror,
            where=directory,
        ) from error


def _only(directory: Path, candidates: list[str], present: frozenset[str]) -> str:
    """The one candidate, or the error that says why there is none to choose."""
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise IndexFileError(
            "several safetensors files and no index to say which are the checkpoint",
            expected=f"{INDEX_NAME}, or {SINGLE_NAME}, or a single *.safetensors",
            found=", ".join(sorted(candidates)[:8]),
            where=directory,
            next_step=f"restore {INDEX_NAME} (the checkpoint ships it), or move the other files away",
        )
    if pickles := sorted(name for name in present if name.endswith(PICKLE_SUFFIXES)):
        raise PickleRefused(
            "the checkpoint has only pickle files, which can run code and are never opened",
            expected="*.safetensors",
            found=", ".join(pickles[:8]),
            where=directory,
            next_step="convert the checkpoint to safetensors, where it is trusted",
        )
    raise MissingShard(
        "the directory has no weights",
        expected=f"{INDEX_NAME} and its files, or {SINGLE_NAME}",
        found="neither",
        where=directory,
    )


def _require_present(directory: Path, names: tuple[str, ...], present: frozenset[str]) -> None:
    missing = [name for name in names if name not in present]
    if missing:
        raise MissingShard(
            "files that the index names are missing",
            expected=f"{len(names)} files",
            found=f"{len(missing)} missing: {', '.join(missing[:8])}",
            where=directory / INDEX_NAME,
            next_step="download the checkpoint again, or restore those files",
        )
    for name in names:
        mode = _stat(directory / name).st_mode
        if not stat.S_ISREG(mode):
            raise _not_regular(directory / name, mode)


def _ignored(present: frozenset[str], used: tuple[str, ...], reason: str) -> dict[str, str]:
    ignored = {}
    for name in sorted(present.difference(used)):
        if name.endswith(".safetensors"):
            ignored[name] = reason
        elif name.endswith(".safetensors.index.json") and name != INDEX_NAME:
            ignored[name] = f"only {INDEX_NAME} is the index"
        elif name.endswith(PICKLE_SUFFIXES):
            ignored[name] = "pickle files are never opened"
    return ignored


def _read_index(path: Path) -> tuple[bytes, tuple[int, ...]]:
    fd = _open(path)
    try:
        with os.fdopen(fd, "rb", closefd=False) as file:
            status = os.fstat(fd)
            raw = file.read(INDEX_LIMIT_BYTES + 1) if status.st_size <= INDEX_LIMIT_BYTES else b""
    except OSError as error:
        raise IndexFileError("the index cannot be read", found=error.strerror, where=path) from error
    finally:
        os.close(fd)
    if max(status.st_size, len(raw)) > INDEX_LIMIT_BYTES:
        raise IndexFileError(
            "the index is too large",
            expected=f"at most {INDEX_LIMIT_BYTES} bytes",
            found=f"{max(status.st_size, len(raw))} bytes",
            where=path,
        )
    return raw, _moment(status)


def _moment(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _open(path: Path) -> int:
    """A read-only descriptor of a regular file, owned by the caller."""
    try:
        return open_regular(path)
    except NotRegularError as error:
        raise _not_regular(path, error.mode) from error
    except OSError as error:
        raise _unusable(path, error) from error


def _stat(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _not_regular(path: Path, mode: int) -> MissingShard:
    return MissingShard(
        "a file of the checkpoint is not a regular file",
        expected="a regular file, or a link to one",
        found=f"file type {stat.filemode(mode)[0]!r}",
        where=path,
    )


def _unusable(path: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return MissingShard("a file of the checkpoint is not there", found=error.strerror, where=path)
    return CheckpointError(
        "a file of the checkpoint cannot be opened", expected="a readable file", found=error.strerror, where=path
    )
