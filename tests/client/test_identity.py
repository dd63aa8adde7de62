"""The contract's rows about config and content, with a real daemon: the right weights, provably, or an error.

The daemon's worker is scripted; configs, receipts and digests are real, and so is whoever compares them.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import Daemon, digest_of, scripted_daemon
from tests.support.forked import in_child
from tests.support.unprivileged import NOBODY, folder_for_everyone
from weightcached.client import WeightSet, attach
from weightcached.protocol.errors import (
    CacheConfigMismatch,
    CheckpointError,
    CheckpointMismatch,
    CheckpointUnproven,
    DaemonAbsent,
    InvalidPlace,
    UntrustedClient,
)
from weightcached.protocol.places import Place
from weightcached.protocol.sidecar import Sidecar, write_sidecar

STRANGERS = 65532


def engine(daemon: Daemon, model: Path, **options: Any) -> WeightSet:
    place = daemon.place
    cache_dir = place.runtime_dir / "digests"
    asked = {"mode": "require", "runtime_dir": place.runtime_dir, "timeout_s": 30.0, "cache_dir": cache_dir, **options}
    return attach(model, **asked)


@pytest.fixture
def copied(settled_model: Path, tmp_path: Path) -> Path:
    """The same bytes as the daemon's checkpoint in other files."""
    return Path(shutil.copytree(settled_model, tmp_path / "copy"))


@pytest.fixture
def config_only(settled_model: Path, tmp_path: Path) -> Path:
    """What a container sees that mounts ``config.json`` and no weights."""
    directory = tmp_path / "bare"
    directory.mkdir()
    shutil.copy(settled_model / "config.json", directory)
    return directory


def flip_a_bit(model: Path) -> None:
    with open(model / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def edit_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_same_files_are_proven_by_receipts(steady_daemon: Daemon, settled_model: Path) -> None:
    with engine(steady_daemon, settled_model) as weights:
        assert weights.source == "daemon"
        assert weights.meta.fingerprint == steady_daemon.report().fingerprint


def test_the_same_files_through_a_link(steady_daemon: Daemon, settled_model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(settled_model)
    with engine(steady_daemon, tmp_path / "link") as weights:
        assert weights.source == "daemon"


@pytest.mark.parametrize(("options", "field"), [({"dtype": "float32"}, "dtype"), ({"layout": "fused"}, "layout")])
@pytest.mark.parametrize("mode", ["client", "require"])
def test_another_option_is_a_mismatch_that_names_it(
    options: dict[str, str], field: str, mode: str, steady_daemon: Daemon, settled_model: Path
) -> None:
    with pytest.raises(CacheConfigMismatch) as caught:
        engine(steady_daemon, settled_model, mode=mode, **options)
    differences = {difference.field: difference for difference in caught.value.fields}
    assert differences.keys() == {field}
    assert differences[field].client == options[field]
    assert differences[field].daemon in ("auto", "hf")


def test_another_config_json_is_a_mismatch_that_names_every_leaf(steady_daemon: Daemon, copied: Path) -> None:
    edit_config(copied, rope_theta=1e6, rope_scaling={"factor": 2.0}, tie_word_embeddings=True)
    with pytest.raises(CacheConfigMismatch) as caught:
        engine(steady_daemon, copied)
    fields = {difference.field for difference in caught.value.fields}
    assert "model.rope_theta" in fields
    assert "model.tie_word_embeddings" in fields
    assert any(field.startswith("model.rope_scaling") for field in fields)


def test_the_same_bytes_in_other_files_are_proven_by_their_digest(steady_daemon: Daemon, copied: Path) -> None:
    with engine(steady_daemon, copied) as weights:
        assert weights.version.startswith("digest:")


def test_one_bit_is_another_checkpoint(steady_daemon: Daemon, copied: Path) -> None:
    """Equal config, equal headers, equal sizes: what a key of headers and paths would take for the same weights."""
    flip_a_bit(copied)
    for mode in ("client", "require"):
        with pytest.raises(CheckpointMismatch, match=digest_of(copied)):
            engine(steady_daemon, copied, mode=mode)


def test_a_checkpoint_that_was_replaced_in_place(place: Place, model: Path) -> None:
    with scripted_daemon(model, place.runtime_dir) as daemon:
        daemon.wait_logged("content digest")
        with engine(daemon, model):
            pass
        flip_a_bit(model)
        with pytest.raises(CheckpointMismatch):
            engine(daemon, model)


def test_weights_that_cannot_be_seen_need_a_digest(
    steady_daemon: Daemon, settled_model: Path, config_only: Path
) -> None:
    with pytest.raises(CheckpointUnproven, match="no weights"):
        engine(steady_daemon, config_only)
    with engine(steady_daemon, config_only, digest=digest_of(settled_model)) as weights:
        assert weights.source == "daemon"
    with pytest.raises(CheckpointMismatch):
        engine(steady_daemon, config_only, digest="0" * 64)


def test_a_sidecar_states_the_digest_of_weights_that_cannot_be_seen(
    steady_daemon: Daemon, settled_model: Path, config_only: Path
) -> None:
    write_sidecar(config_only, Sidecar(digest_of(settled_model), None, 0))
    with engine(steady_daemon, config_only) as weights:
        assert weights.source == "daemon"
    write_sidecar(config_only, Sidecar("0" * 64, None, 0))
    with pytest.raises(CheckpointMismatch):
        engine(steady_daemon, config_only)


def test_no_daemon_and_no_weights_is_an_error_that_says_both(place: Place, config_only: Path) -> None:
    with pytest.raises(DaemonAbsent, match=f"mount the weights at {config_only}"):
        attach(config_only, mode="client", runtime_dir=place.runtime_dir)


def test_a_checkpoint_that_is_broken_here(steady_daemon: Daemon, copied: Path) -> None:
    (copied / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        engine(steady_daemon, copied)


def test_whatever_is_current(steady_daemon: Daemon, copied: Path) -> None:
    flip_a_bit(copied)
    with engine(steady_daemon, copied, want="current") as weights:
        assert weights.source == "daemon"


def test_a_version(steady_daemon: Daemon, settled_model: Path) -> None:
    with engine(steady_daemon, settled_model) as weights:
        receipts_version = weights.receipts_version
    for want in (receipts_version, steady_daemon.report().version):
        with engine(steady_daemon, settled_model, want=want) as weights:
            assert weights.receipts_version == receipts_version
    with pytest.raises(CheckpointMismatch, match="another version"):
        engine(steady_daemon, settled_model, want="digest:0")


@pytest.fixture
def open_model() -> Iterator[Path]:
    """A checkpoint that every user can read."""
    with folder_for_everyone() as folder:
        yield tiny_llama(folder / "model")


@pytest.mark.root
def test_a_user_that_the_daemon_serves(open_model: Path, place: Place) -> None:
    with scripted_daemon(open_model, place.runtime_dir, "--allow-uid", str(NOBODY)) as daemon:
        daemon.wait_until("ready")

        def work() -> None:
            with engine(daemon, open_model, want="current") as weights:
                assert len(list(weights.values())) == 1

        in_child(work, uid=NOBODY)


@pytest.mark.root
def test_a_user_that_the_daemon_does_not_serve(open_model: Path, place: Place) -> None:
    """With a daemon for itself the socket is closed to others; with a shared one the daemon itself refuses."""
    with scripted_daemon(open_model, place.runtime_dir) as daemon:
        daemon.wait_until("ready")

        def closed() -> None:
            with pytest.raises(InvalidPlace, match="Permission denied"):
                engine(daemon, open_model, mode="client")

        in_child(closed, uid=NOBODY)
    with scripted_daemon(open_model, place.runtime_dir, "--allow-uid", str(STRANGERS)) as daemon:
        daemon.wait_until("ready")

        def refused() -> None:
            with pytest.raises(UntrustedClient, match="does not serve that user"):
                engine(daemon, open_model, mode="client")

        in_child(refused, uid=NOBODY)
