"""Snapshots as files: what was written is what is opened, and every way in which it is not is an error of its own."""

import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.unprivileged import NOBODY
from weightcached.protocol import snapshot
from weightcached.protocol.config import LAYOUT_REVISIONS, CacheConfig, Parallel
from weightcached.protocol.errors import SnapshotMismatch, SnapshotUnusable, SnapshotUnwritable
from weightcached.protocol.manifest import Manifest, NameAccounting, encode_manifest
from weightcached.protocol.snapshot import MANIFEST_NAME, Snapshot, open_snapshot, write_snapshot
from weightcached.protocol.testing import HonestGrant, TensorBytes, honest_grant

CONFIG = CacheConfig(
    architecture="LlamaForCausalLM",
    layout="hf",
    layout_revision=LAYOUT_REVISIONS["hf"],
    parallel=Parallel(tp_size=1, tp_rank=0),
    model={"hidden_size": 8},
)
DEVICE = "host-tp0of1"
TENSORS = {
    "a": TensorBytes("uint8", (1000,), bytes(n % 251 for n in range(1000))),
    "b": TensorBytes("float32", (2, 3), bytes(range(24))),
    "empty": TensorBytes("float16", (0, 4), b""),
}


@pytest.fixture
def granted() -> Iterator[HonestGrant]:
    with honest_grant(TENSORS, config=CONFIG, aliases={"tied": "a"}, digest="d" * 64) as granted:
        yield granted


def written(directory: Path, granted: HonestGrant) -> Path:
    return write_snapshot(directory, DEVICE, manifest=granted.manifest, segments=[memoryview(granted.segment)])


def contents(opened: Snapshot) -> list[bytes]:
    return [os.pread(fd, 1 << 20, 0) for fd in opened.files.values()]


def refused(directory: Path, error: type[Exception], message: str) -> str:
    """Opening raises ``error``; the text. Nothing stays open."""
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message) as caught, open_snapshot(directory, DEVICE):
        pass
    assert sorted(os.listdir("/proc/self/fd")) == before
    return str(caught.value)


def test_what_was_written_is_opened(tmp_path: Path, granted: HonestGrant) -> None:
    assert written(tmp_path / "snap", granted) == tmp_path / "snap" / DEVICE
    with open_snapshot(tmp_path / "snap", DEVICE) as opened:
        assert list(opened.manifest) == list(Manifest.decode(granted.manifest))
        assert contents(opened) == [granted.segment]
        assert opened.digest == "d" * 64
        opened.require_config(CONFIG)


def test_another_one_replaces_it_in_one_step(tmp_path: Path, granted: HonestGrant) -> None:
    """Whoever has the earlier one open still reads it; nothing of it is left afterwards."""
    written(tmp_path, granted)
    other = {"a": TensorBytes("uint8", (5,), b"other")}
    with honest_grant(other, config=CONFIG, digest="e" * 64) as later, open_snapshot(tmp_path, DEVICE) as earlier:
        written(tmp_path, later)
        assert contents(earlier) == [granted.segment]
        with open_snapshot(tmp_path, DEVICE) as opened:
            assert contents(opened) == [later.segment]
        assert len(list((tmp_path / DEVICE).iterdir())) == 2


@pytest.mark.parametrize("step", ["write_aside", "_write_segment", "_remove_all_but"])
def test_a_writer_killed_at_any_step_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, granted: HonestGrant, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    written(tmp_path, granted)
    other = {"a": TensorBytes("uint8", (5,), b"other")}

    def killed(*_: object, **__: object) -> None:
        raise SystemExit

    with honest_grant(other, config=CONFIG, digest="e" * 64) as later:
        with monkeypatch.context() as patched:
            patched.setattr(snapshot, step, killed)
            with pytest.raises(SystemExit):
                written(tmp_path, later)
        with open_snapshot(tmp_path, DEVICE) as opened:
            assert contents(opened) == [later.segment if step == "_remove_all_but" else granted.segment]
        written(tmp_path, later)
        assert len(list((tmp_path / DEVICE).iterdir())) == 2  # what the killed one left is gone


def test_a_disk_that_is_full_leaves_the_old_one(
    tmp_path: Path, granted: HonestGrant, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, granted)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(SnapshotUnwritable, match="No space left"):
            written(tmp_path, granted)
    with open_snapshot(tmp_path, DEVICE) as opened:
        assert contents(opened) == [granted.segment]
    assert len(list((tmp_path / DEVICE).iterdir())) == 2


def test_two_writers_do_not_meet(tmp_path: Path, granted: HonestGrant) -> None:
    folder = written(tmp_path, granted)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(SnapshotUnwritable, match="another process"):
            written(tmp_path, granted)
    finally:
        os.close(fd)


def test_a_place_that_cannot_be_written(tmp_path: Path, granted: HonestGrant) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotUnwritable, match="Not a directory"):
        written(tmp_path / "file", granted)


def test_none_there_says_which_are(tmp_path: Path, granted: HonestGrant) -> None:
    assert "none at all" in refused(tmp_path / "nowhere", SnapshotUnusable, "no snapshot of this rank")
    write_snapshot(tmp_path, "host-tp1of2", manifest=granted.manifest, segments=[memoryview(granted.segment)])
    assert "host-tp1of2" in refused(tmp_path, SnapshotUnusable, "no snapshot of this rank")


@pytest.mark.parametrize("nbytes", [0, 20, 45, -1])
def test_a_manifest_that_is_cut_off(tmp_path: Path, granted: HonestGrant, nbytes: int) -> None:
    path = written(tmp_path, granted) / MANIFEST_NAME
    os.truncate(path, nbytes % path.stat().st_size)
    refused(tmp_path, SnapshotUnusable, r"damaged or torn|is not one")


@pytest.mark.parametrize("offset", [9, 40, 200, -1])
def test_a_bit_of_the_manifest(tmp_path: Path, granted: HonestGrant, offset: int) -> None:
    path = written(tmp_path, granted) / MANIFEST_NAME
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    refused(tmp_path, SnapshotUnusable, "damaged or torn")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_segment_of_another_size(tmp_path: Path, granted: HonestGrant, change: int) -> None:
    (path,) = (path for path in written(tmp_path, granted).iterdir() if path.name != MANIFEST_NAME)
    os.truncate(path, len(granted.segment) + change)
    text = refused(tmp_path, SnapshotUnusable, "segment 0 is not whole")
    assert path.name in text
    path.unlink()
    refused(tmp_path, SnapshotUnusable, "cannot be opened")


def test_another_release_is_told_by_its_first_bytes(tmp_path: Path, granted: HonestGrant) -> None:
    path = written(tmp_path, granted) / MANIFEST_NAME
    data = path.read_bytes()
    path.write_bytes(data.replace(b"WCDSNAP1", b"WCDSNAP2"))
    assert "WCDSNAP2" in refused(tmp_path, SnapshotMismatch, "another release")
    path.write_bytes(b"something else")
    refused(tmp_path, SnapshotUnusable, "is not one")


def test_a_manifest_of_another_release(tmp_path: Path, granted: HonestGrant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, as its checksum says, and yet not to be read here."""
    written(tmp_path, granted)
    monkeypatch.setattr("weightcached.protocol.manifest.FORMAT", 2)
    refused(tmp_path, SnapshotMismatch, "this release cannot read")


def test_another_configuration_is_told_field_by_field(tmp_path: Path, granted: HonestGrant) -> None:
    written(tmp_path, granted)
    asked = CONFIG.model_copy(update={"dtype": "float32", "model": {"hidden_size": 16}})
    with open_snapshot(tmp_path, DEVICE) as opened:
        with pytest.raises(SnapshotMismatch, match="another configuration") as caught:
            opened.require_config(asked)
        assert re.search(r"dtype: it has 'auto', 'float32' is asked for", str(caught.value))
        assert re.search(r"model\.hidden_size: it has 8, 16 is asked for", str(caught.value))


def test_a_configuration_with_fields_that_another_release_did_not_have(tmp_path: Path, granted: HonestGrant) -> None:
    """Engines would be refused later, by the fingerprint."""
    meta = Manifest.decode(granted.manifest).meta.model_copy(update={"fingerprint": "0" * 64})
    manifest = encode_manifest(meta, list(Manifest.decode(granted.manifest)), NameAccounting())
    write_snapshot(tmp_path, DEVICE, manifest=manifest, segments=[memoryview(granted.segment)])
    with open_snapshot(tmp_path, DEVICE) as opened, pytest.raises(SnapshotMismatch, match="another release"):
        opened.require_config(CONFIG)
    meta = meta.model_copy(update={"config": {**meta.config, "unheard_of": 1}})
    manifest = encode_manifest(meta, list(Manifest.decode(granted.manifest)), NameAccounting())
    write_snapshot(tmp_path, DEVICE, manifest=manifest, segments=[memoryview(granted.segment)])
    with open_snapshot(tmp_path, DEVICE) as opened, pytest.raises(SnapshotMismatch, match="not one that this release"):
        opened.require_config(CONFIG)


def test_files_that_others_could_have_written_do_not_count(tmp_path: Path, granted: HonestGrant) -> None:
    """A snapshot vouches for the content it came from."""
    folder = written(tmp_path, granted)
    for path in folder.iterdir():
        path.chmod(0o664)
        assert path.name in refused(tmp_path, SnapshotUnusable, "others could have written")
        path.chmod(0o644)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
            refused(tmp_path, SnapshotUnusable, "others could have written")
            os.chown(path, 0, 0)
    with open_snapshot(tmp_path, DEVICE):
        pass


def test_a_snapshot_without_a_digest_vouches_for_nothing(tmp_path: Path) -> None:
    with honest_grant(TENSORS, config=CONFIG, receipts="1" * 64) as granted:
        written(tmp_path, granted)
    with (
        open_snapshot(tmp_path, DEVICE) as opened,
        pytest.raises(SnapshotUnusable, match="which content"),
    ):
        _ = opened.digest
