"""Files that others wrote: the index, the sidecar, ``config.json``, an entry of the digest cache, a snapshot. Each is
understood, or ends in its own error; none is waited for.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.checkpoints import tiny_config
from tests.support.fuzzing import JSON_VALUES, MIB, altered, damaged, ends_in
from weightcached.protocol.config import (
    CacheConfig,
    Parallel,
    abbreviated,
    build_config,
    differing_entries,
    explain_differences,
    provenance_of,
    read_model_config,
)
from weightcached.protocol.digest_cache import HEX, DigestCache
from weightcached.protocol.errors import (
    CheckpointError,
    ConfigurationError,
    IndexFileError,
    ModelConfigError,
    PickleRefused,
    ProtocolError,
    SnapshotMismatch,
)
from weightcached.protocol.framing import encode_frame
from weightcached.protocol.index_file import parse_index
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.messages import CLIENT_TO_DAEMON
from weightcached.protocol.sidecar import SIDECAR_NAME, Sidecar, read_sidecar
from weightcached.protocol.snapshot import open_snapshot
from weightcached.protocol.testing import TensorBytes, honest_grant

MODEL = tiny_config()
CONFIG = json.dumps(MODEL).encode()
INDEX = {
    "metadata": {"total_size": 100},
    "weight_map": {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"},
}
SIDECAR = {"schema": 1, "digest": "a" * 64, "receipts": "b" * 64, "nbytes": 100}
RECEIPTS = "c" * 64
ENTRY = {"schema": 1, "receipts": RECEIPTS, "digest": "d" * 64}


def text_of(honest: Any) -> st.SearchStrategy[bytes]:
    """JSON that is nearly ``honest``: values altered, or the text damaged."""
    # As Python writes it: with NaN, and with lone surrogates as escapes.
    values = altered(honest, JSON_VALUES).map(lambda tree: json.dumps(tree).encode())
    return values | damaged(json.dumps(honest).encode()) | st.binary(max_size=60)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@given(text_of(INDEX))
def test_an_index(raw: bytes) -> None:
    weight_map = ends_in((IndexFileError, PickleRefused), lambda: parse_index(raw, where="index"))
    for tensor, name in (weight_map or {}).items():
        assert name.endswith(".safetensors")
        assert os.path.basename(name) == name
        assert "\0" not in name
        (tensor + name).encode()


@given(raw=text_of(SIDECAR))
def test_a_sidecar(folder: Path, raw: bytes) -> None:
    (folder / SIDECAR_NAME).write_bytes(raw)
    sidecar = ends_in(CheckpointError, lambda: read_sidecar(folder))
    if sidecar is not None:
        assert isinstance(sidecar, Sidecar)
        assert HEX.fullmatch(sidecar.digest)
        assert sidecar.receipts is None or HEX.fullmatch(sidecar.receipts)
        assert sidecar.nbytes >= 0


@given(raw=text_of(ENTRY))
def test_an_entry_of_the_digest_cache(folder: Path, raw: bytes) -> None:
    """One that is damaged is a warning, and the digest is computed again."""
    cache = DigestCache(folder / "cache")
    warnings: list[str] = []
    with cache.opened(warnings) as shelf:
        (folder / "cache" / f"{RECEIPTS}.json").write_bytes(raw)
        digest = ends_in((), lambda: shelf.recall(RECEIPTS))
    assert digest is None or HEX.fullmatch(digest)
    assert len(warnings) == (digest is None)
    assert all(warning.isprintable() for warning in warnings)


@pytest.fixture(scope="module")
def snapshot_manifest() -> bytes:
    config = CacheConfig(
        architecture="A", layout="hf", layout_revision=1, parallel=Parallel(tp_size=1, tp_rank=0), model={}
    )
    tensors = {"a": TensorBytes("uint8", (5,), b"bytes"), "b": TensorBytes("float16", (0, 4), b"")}
    with honest_grant(tensors, config=config, digest="d" * 64) as granted:
        return granted.manifest


@given(data=st.data(), is_summed=st.booleans())
def test_a_snapshot(folder: Path, snapshot_manifest: bytes, data: st.DataObject, is_summed: bool) -> None:
    """Damaged after it was written, or written by somebody who knows the form: with the right sum."""
    written = snapshot_file(snapshot_manifest)
    raw = snapshot_file(data.draw(damaged(snapshot_manifest))) if is_summed else data.draw(damaged(written))
    rank = folder / "snapshot" / "host-tp0of1"
    rank.mkdir(parents=True, exist_ok=True)
    (rank / "manifest").write_bytes(raw)
    generation = Manifest.decode(snapshot_manifest).meta.generation
    (rank / f"{generation}.0").write_bytes(b"bytes")

    def use() -> str:
        with open_snapshot(folder / "snapshot", "host-tp0of1") as opened:
            return opened.digest

    digest = ends_in((CheckpointError, SnapshotMismatch), use)
    assert digest is None or HEX.fullmatch(digest)


def snapshot_file(manifest: bytes) -> bytes:
    return b"WCDSNAP1" + hashlib.sha256(manifest).digest() + manifest


def use_config(directory: Path) -> CacheConfig:
    """What an engine does with ``config.json`` until it has asked, and a daemon that was asked for something else."""
    config = build_config(directory, layout="fused", tp_size=2, tp_rank=1)
    assert len(config.fingerprint) == len(config.rankless_fingerprint) == 64
    entries = config.entries()
    short = abbreviated(entries)
    assert differing_entries(entries, short) == []
    others = CacheConfig.model_validate({**config.model_dump(), "model": MODEL}).entries()
    assert set(differing_entries(others, short)) == {
        name for name in others.keys() | entries.keys() if repr(others.get(name)) != repr(entries.get(name))
    } or explain_differences(others, entries)
    return config


@given(raw=text_of(MODEL))
@example(json.dumps({**MODEL, "x" * 1001: 1}).encode())  # found: not an error of ours, and only in the Hello
@example(json.dumps({**MODEL, "x" * 1000: 1}).encode())
@example(json.dumps({**MODEL, "huge": 2**64}).encode())
@example(json.dumps({**MODEL, "lone": "\ud800"}).encode())
@example(json.dumps({**MODEL, "architectures": ["\ud800"]}).encode())
@example(json.dumps({**MODEL, "not": float("nan"), "infinite": float("inf")}).encode())
@example(json.dumps({**MODEL, "deep": json.loads("[" * 63 + "]" * 63)}).encode())
def test_a_model_config(folder: Path, raw: bytes) -> None:
    (folder / "config.json").write_bytes(raw)
    config = ends_in((ModelConfigError, ConfigurationError), lambda: use_config(folder), memory_max_nbytes=32 * MIB)
    if config is not None:
        # All that is left to find when it is said to a daemon is that it is too much.
        ends_in(ProtocolError, lambda: encode_frame(CLIENT_TO_DAEMON, hello_of(config)))


def hello_of(config: CacheConfig) -> Any:
    from weightcached.client.evidence import Evidence
    from weightcached.client.exchange import Request
    from weightcached.protocol.deadline import Deadline

    request = Request(config, abbreviated(config.entries()), "checkpoint", "engine", 1, "0.1.0", "there")
    return request.hello(Evidence(receipts=RECEIPTS), Deadline.after(1.0))


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [_fifo, _endless, Path.mkdir, _sparse])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SIDECAR_NAME])
def test_what_is_no_file_or_has_no_end_is_not_waited_for(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    readers: dict[str, Callable[[], object]] = {
        "config.json": lambda: read_model_config(tmp_path),
        SIDECAR_NAME: lambda: read_sidecar(tmp_path),
    }
    if name in readers:
        assert ends_in(CheckpointError, readers[name], memory_max_nbytes=40 * MIB) is None
    else:
        described = ends_in((), lambda: provenance_of(tmp_path))
        assert described is not None
        assert (described.tokenizer_sha256 is not None) == (make is _sparse)
