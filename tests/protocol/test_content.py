"""Which files are the weights, how they are opened, and what their receipts notice."""

import json
import mmap
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.mounts import in_mount_namespace
from tests.support.weight_directories import make, receipts_of
from weightcached.protocol import index_file
from weightcached.protocol.content import SINGLE_NAME, open_weights, take_receipts, version_of, weight_files
from weightcached.protocol.errors import (
    CheckpointChanged,
    CheckpointError,
    IndexFileError,
    InvalidOption,
    MissingShard,
    PickleRefused,
)
from weightcached.protocol.filesystems import checked_name, file_system_of
from weightcached.protocol.index_file import INDEX_NAME, parse_index


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    files = {"model-1.safetensors": b"one", "model-2.safetensors": b"two"}
    return make(tmp_path / "sharded", files, {"a": "model-1.safetensors", "b": "model-2.safetensors"})


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# Which files


def test_the_index_is_the_authority(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"both once more")
    (sharded / "model.safetensors").write_bytes(b"and again")
    (sharded / "pytorch_model.bin").write_bytes(b"")
    (sharded / "model.fp16.safetensors.index.json").write_text("{}")
    found = weight_files(sharded)
    assert found.names == ("model-1.safetensors", "model-2.safetensors")
    assert found.index == INDEX_NAME
    assert found.weight_map == {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    assert found.ignored.keys() == {
        "consolidated.safetensors",
        "model.safetensors",
        "pytorch_model.bin",
        "model.fp16.safetensors.index.json",
    }
    assert all(found.ignored.values())


def test_model_safetensors_is_the_whole_checkpoint_without_an_index(tmp_path: Path) -> None:
    files = {"model.safetensors": b"", "consolidated.safetensors": b"", "training_args.bin": b"", "config.json": b"{}"}
    found = weight_files(make(tmp_path, files))
    assert (found.names, found.index, found.weight_map) == (("model.safetensors",), None, None)
    assert found.ignored.keys() == {"consolidated.safetensors", "training_args.bin"}


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    found = weight_files(make(tmp_path, {"gpt.safetensors": b"", "pytorch_model.bin": b""}))
    assert found.names == ("gpt.safetensors",)


def test_links_to_files_are_files(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in sharded.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert weight_files(snapshot).names == weight_files(sharded).names


@pytest.mark.parametrize(
    ("files", "error"),
    [
        pytest.param({"a.safetensors": b"", "b.safetensors": b""}, IndexFileError, id="several, no index"),
        pytest.param({"pytorch_model.bin": b"", "x.pt": b""}, PickleRefused, id="pickle only"),
        pytest.param({"config.json": b"{}"}, MissingShard, id="no weights"),
    ],
)
def test_without_an_index_the_choice_must_be_clear(
    tmp_path: Path, files: dict[str, bytes], error: type[CheckpointError]
) -> None:
    with pytest.raises(error) as caught:
        weight_files(make(tmp_path, files))
    assert caught.value.where == tmp_path
    assert type(caught.value) is error


def test_a_shard_that_the_index_names_must_be_there(sharded: Path) -> None:
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(MissingShard, match=r"model-2\.safetensors"):
        weight_files(sharded)


def test_what_is_not_a_directory_is_an_error_of_its_own(tmp_path: Path) -> None:
    for place in (tmp_path / "absent", make(tmp_path, {"file": b""}) / "file"):
        with pytest.raises(CheckpointError) as caught:
            weight_files(place)
        assert caught.value.where == place


@pytest.mark.parametrize("kind", ["fifo", "directory", "dangling link"])
@pytest.mark.parametrize("name", ["model-2.safetensors", INDEX_NAME])
def test_only_regular_files_are_weights_and_nothing_waits_for_a_fifo(sharded: Path, kind: str, name: str) -> None:
    path = sharded / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    before = open_fds()
    with pytest.raises(MissingShard) as caught:
        weight_files(sharded)
    assert caught.value.where == path
    assert open_fds() == before


# The index's text

BAD_INDEX_TEXTS = {
    "not JSON": b'{"weight_map": {"a": "x.safetensors"}',
    "not UTF-8": b'{"weight_map": {"\xff": "x.safetensors"}}',
    "a byte order mark": b'\xef\xbb\xbf{"weight_map": {"a": "x.safetensors"}}',
    "not an object": b'["a"]',
    "no weight_map": b'{"metadata": {}}',
    "weight_map is a list": b'{"weight_map": ["x.safetensors"]}',
    "empty": b'{"weight_map": {}}',
    "a number for a file": b'{"weight_map": {"a": 1}}',
    "null for a file": b'{"weight_map": {"a": null}}',
    "a tensor twice": b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    "weight_map twice": b'{"weight_map": {"a": "x.safetensors"}, "weight_map": {"a": "x.safetensors"}}',
    "NaN": b'{"metadata": NaN, "weight_map": {"a": "x.safetensors"}}',
    "a number beyond reason": b'{"metadata": ' + b"9" * 5000 + b', "weight_map": {"a": "x.safetensors"}}',
    "nested without end": b"[" * 200_000,
    "a lone surrogate": b'{"weight_map": {"a": "\\ud800.safetensors"}}',
    "a tensor that is no text": b'{"weight_map": {"\\udfff": "x.safetensors"}}',
    "a parent": b'{"weight_map": {"a": "../x.safetensors"}}',
    "an absolute path": b'{"weight_map": {"a": "/x.safetensors"}}',
    "a folder": b'{"weight_map": {"a": "original/x.safetensors"}}',
    "dots": b'{"weight_map": {"a": ".."}}',
    "nothing": b'{"weight_map": {"a": ""}}',
    "a NUL": b'{"weight_map": {"a": "x\\u0000.safetensors"}}',
    "too long a name": b'{"weight_map": {"a": "' + b"x" * 250 + b'.safetensors"}}',
    "another kind": b'{"weight_map": {"a": "x.gguf"}}',
}


@pytest.mark.parametrize("raw", BAD_INDEX_TEXTS.values(), ids=BAD_INDEX_TEXTS)
def test_an_index_says_one_thing_or_nothing(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / INDEX_NAME).write_bytes(raw)
    with pytest.raises(IndexFileError) as caught:
        weight_files(tmp_path)
    assert caught.value.where == str(tmp_path / INDEX_NAME)
    assert caught.value.found
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


def test_an_index_of_pickle_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PickleRefused):
        weight_files(make(tmp_path, {"x.bin": b""}, {"a": "x.bin"}))


def test_an_index_over_its_limit_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / INDEX_NAME, "wb") as file:
        file.truncate(index_file.INDEX_LIMIT_BYTES + 1)
    with pytest.raises(IndexFileError, match="too large"):
        weight_files(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
file_names = st.one_of(st.text(max_size=300), st.text(max_size=8).map(lambda stem: stem + ".safetensors"))
documents = st.fixed_dictionaries(
    {"weight_map": st.dictionaries(st.text(), file_names | json_values, max_size=4) | json_values},
    optional={"metadata": json_values},
)
index_bytes = st.one_of(
    st.binary(max_size=200),
    (documents | json_values).map(lambda value: json.dumps(value).encode()),
    st.builds(
        lambda value, cut, junk: json.dumps(value).encode()[:cut] + junk,
        documents,
        st.integers(0, 80),
        st.binary(max_size=4),
    ),
)


def parsed(raw: bytes) -> tuple[Mapping[str, str], None] | tuple[None, CheckpointError]:
    try:
        return parse_index(raw, where="here"), None
    except (IndexFileError, PickleRefused) as error:
        return None, error


@given(index_bytes)
@settings(max_examples=250, deadline=None)
def test_any_bytes_are_a_map_of_plain_names_or_a_named_error(raw: bytes) -> None:
    weight_map, error = parsed(raw)
    if error is not None:
        assert error.where == "here"
        assert str(error).isprintable()
        return
    assert weight_map == json.loads(raw)["weight_map"]
    assert weight_map
    for tensor, name in weight_map.items():
        tensor.encode()
        assert os.path.basename(name) == name != ""
        assert os.fsencode(name).endswith(b".safetensors")


# Opening


def test_files_are_opened_for_reading_only_and_closed_at_the_end(sharded: Path) -> None:
    before = open_fds()
    with open_weights(weight_files(sharded)) as weights:
        assert sorted(weights) == ["model-1.safetensors", "model-2.safetensors", INDEX_NAME]
        for name, fd in weights.items():
            assert os.pread(fd, 4096, 0) == (sharded / name).read_bytes()
            assert not os.get_inheritable(fd)
            assert os.get_blocking(fd)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
        assert open_fds() == before + 3
    assert open_fds() == before
    assert not weights


@pytest.mark.parametrize("loss", ["gone", "fifo"])
def test_a_file_lost_between_listing_and_opening_leaves_nothing_open(sharded: Path, loss: str) -> None:
    found = weight_files(sharded)
    (sharded / "model-2.safetensors").unlink()
    if loss == "fifo":
        os.mkfifo(sharded / "model-2.safetensors")
    before = open_fds()
    with pytest.raises(MissingShard):
        open_weights(found)
    assert open_fds() == before


def test_another_index_in_the_place_of_the_one_read_is_a_change(sharded: Path) -> None:
    found = weight_files(sharded)
    text = (sharded / INDEX_NAME).read_text()
    (sharded / "aside").write_text(text)
    (sharded / "aside").rename(sharded / INDEX_NAME)
    before = open_fds()
    with pytest.raises(CheckpointChanged):
        open_weights(found)
    assert open_fds() == before


# Receipts


def test_receipts_are_the_same_through_a_linked_directory_and_not_those_of_a_copy(
    sharded: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(sharded)
    shutil.copytree(sharded, tmp_path / "copy")
    assert receipts_of(tmp_path / "link").sha256 == receipts_of(sharded).sha256
    assert receipts_of(tmp_path / "copy").sha256 != receipts_of(sharded).sha256


def test_the_index_is_part_of_the_receipts(sharded: Path) -> None:
    receipts = receipts_of(sharded)
    assert [entry.name for entry in receipts.entries] == ["model-1.safetensors", "model-2.safetensors", INDEX_NAME]
    assert receipts.nbytes == 3 + 3 + (sharded / INDEX_NAME).stat().st_size


def test_a_file_replaced_in_place_with_the_same_size_and_time_is_noticed_by_ctime(sharded: Path) -> None:
    path = sharded / "model-1.safetensors"
    before = receipts_of(sharded)
    status = path.stat()
    with open(path, "r+b") as file:
        file.write(b"eno")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    after = receipts_of(sharded)
    assert after.sha256 != before.sha256
    with pytest.raises(CheckpointChanged) as caught:
        before.require_same(after)
    assert caught.value.found == "model-1.safetensors (ctime_ns)"


def test_another_file_under_the_same_name_is_noticed(sharded: Path) -> None:
    before = receipts_of(sharded)
    shutil.copy2(sharded / "model-1.safetensors", sharded / "aside")
    (sharded / "aside").rename(sharded / "model-1.safetensors")
    with pytest.raises(CheckpointChanged, match=r"model-1\.safetensors \(inode"):
        before.require_same(receipts_of(sharded))


def test_a_chmod_is_another_receipt(sharded: Path) -> None:
    before = receipts_of(sharded)
    (sharded / "model-1.safetensors").chmod(0o640)
    assert receipts_of(sharded).sha256 != before.sha256


def test_receipts_that_are_equal_are_the_same(sharded: Path) -> None:
    receipts_of(sharded).require_same(receipts_of(sharded))


def test_stores_through_a_shared_mapping_are_seen(sharded: Path) -> None:
    """The first look settles the dirty page; only because of that does the second store move a timestamp."""
    with open(sharded / "model-1.safetensors", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        if file_system_of(file.fileno()) != "ext4":
            pytest.skip("only ext4 is known to settle stores through a mapping on fsync")
        mapping[0] = 1
        before = receipts_of(sharded)
        mapping[0] = 2
        assert receipts_of(sharded).sha256 != before.sha256


def test_receipts_are_young_for_two_seconds_after_the_last_edit(sharded: Path) -> None:
    receipts = receipts_of(sharded)
    newest = max(entry.ctime_ns for entry in receipts.entries)
    assert receipts.is_young()
    assert receipts.is_young(newest + 1_999_999_999)
    assert not receipts.is_young(newest + 2_000_000_000)
    assert receipts.settled_at_ns == newest + 2_000_000_000
    assert receipts.is_young(newest - 3_600_000_000_000), "a ctime in the future says nothing"


def test_mtime_does_not_make_files_old_or_young(sharded: Path) -> None:
    for when in (0, 2**40):  # 1970, and long after us
        os.utime(sharded / "model-1.safetensors", ns=(when, when))
        receipts = receipts_of(sharded)
        assert abs(receipts.settled_at_ns - time.time_ns()) < 10_000_000_000


# Which file systems are believed


TRUST_OF_ARGUMENTS = """
import json, os
from weightcached.protocol.content import take_receipts
answers = []
for name, more in ARGUMENTS:
    receipts = take_receipts({name: os.open(name, os.O_RDONLY)}, also_trusted=more)
    answers.append([receipts.trusted, receipts.rule])
print(json.dumps(answers))
"""


def trust(setup: str, cwd: Path, *arguments: tuple[str, list[str]]) -> list[tuple[bool, str]]:
    """(trusted, rule) for each (file, what the operator trusts). Paths are relative to where the shell lines end."""
    program = TRUST_OF_ARGUMENTS.replace("ARGUMENTS", json.dumps(arguments))
    answers = in_mount_namespace(setup, program, cwd)
    assert isinstance(answers, list)
    return [(trusted, rule) for trusted, rule in answers]


@pytest.mark.root
def test_tmpfs_is_believed_and_ramfs_only_by_the_operators_word(tmp_path: Path) -> None:
    setup = "mkdir t r; mount -t tmpfs tmpfs t; mount -t ramfs ramfs r; echo 1 >t/x; echo 1 >r/x"
    tmpfs, ramfs, allowed = trust(setup, tmp_path, ("t/x", []), ("r/x", []), ("r/x", ["ramfs"]))
    assert tmpfs == (True, "tmpfs is trusted")
    assert not ramfs[0]
    assert "r/x: ramfs" in ramfs[1]
    assert allowed == (True, "ramfs is trusted by the operator")


@pytest.mark.root
def test_an_overlay_is_believed_for_the_layer_that_holds_the_file(tmp_path: Path) -> None:
    setup = """
    mkdir base; mount -t tmpfs tmpfs base; cd base
    mkdir "low er:1" low2 low2/deep up work all bound ram; mount -t ramfs ramfs ram; mkdir ram/below
    echo 1 >"low er:1/one"; echo 2 >low2/deep/two; echo 3 >ram/below/three
    layers="lowerdir=$PWD/low er\\:1:$PWD/low2:$PWD/ram/below,upperdir=$PWD/up,workdir=$PWD/work"
    mount -t overlay overlay -o "$layers" all
    echo 4 >all/four
    mount --bind all/deep bound
    """
    names = ["all/one", "all/deep/two", "all/three", "all/four", "bound/two"]
    one, two, three, four, bound = trust(setup, tmp_path, *((name, []) for name in names))
    for answer in (one, two, four, bound):
        assert answer == (True, "overlay over a layer where tmpfs is trusted")
    assert not three[0]
    assert "ramfs" in three[1]


@pytest.mark.root
def test_an_overlay_whose_layers_are_out_of_sight_is_not_believed(tmp_path: Path) -> None:
    """As in a container: the paths in mountinfo are the host's, and may even lead to other files here."""
    setup = """
    mkdir base; mount -t tmpfs tmpfs base; cd base; mkdir low up work all
    echo 1 >low/x
    mount -t overlay overlay -o "lowerdir=$PWD/low,upperdir=$PWD/up,workdir=$PWD/work" all
    mv low hidden; mkdir low; echo 2 >low/x; touch -d yesterday low/x
    """
    hidden, allowed = trust(setup, tmp_path, ("all/x", []), ("all/x", ["overlay"]))
    assert not hidden[0]
    assert "cannot be seen" in hidden[1]
    assert allowed[0]


@pytest.mark.root
def test_an_overlay_over_its_own_layer_is_not_believed(tmp_path: Path) -> None:
    """As the root of a system that keeps no change: its layer's path leads to the overlay itself, and round again."""
    setup = """
    mkdir base; mount -t tmpfs tmpfs base; cd base; mkdir all up work
    echo 1 >all/x
    mount -t overlay overlay -o "lowerdir=$PWD/all,upperdir=$PWD/up,workdir=$PWD/work" all
    """
    [(trusted, rule)] = trust(setup, tmp_path, ("all/x", []))
    assert not trusted
    assert "cannot be seen" in rule


def test_a_file_system_without_fsync_proves_nothing_unless_the_operator_says_so() -> None:
    fd = os.open("/proc/version", os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert file_system_of(fd) == "0x9fa0"
        plain = take_receipts({"version": fd})
        allowed = take_receipts({"version": fd}, also_trusted={checked_name("0x9fa0")})
    finally:
        os.close(fd)
    assert (plain.trusted, allowed.trusted) == (False, True)
    assert plain.sha256 == allowed.sha256


def test_names_of_file_systems_are_checked() -> None:
    assert checked_name("zfs") == "zfs"
    for name in ("", "zfsx", "0x", "0xZZ", "0x123456789"):
        with pytest.raises(InvalidOption):
            checked_name(name)


# Versions


def test_a_version_is_the_config_and_the_digest_or_the_receipts_until_it_is_known() -> None:
    fingerprint, digest, receipts = "1" * 64, "2" * 64, "3" * 64
    version = version_of(fingerprint, digest=digest, receipts=None)
    assert version.startswith("digest:")
    assert version == version_of(fingerprint, digest=digest, receipts=receipts)
    assert version_of(fingerprint, digest=None, receipts=receipts).startswith("receipts:")
    others = {
        version_of("4" * 64, digest=digest, receipts=None),
        version_of(fingerprint, digest="4" * 64, receipts=None),
        version_of(fingerprint, digest=None, receipts=digest).replace("receipts:", "digest:"),
    }
    assert len(others | {version}) == 4
    with pytest.raises(ValueError, match="a version needs"):
        version_of(fingerprint, digest=None, receipts=None)


def test_whoever_leaves_open_weights_by_an_error_of_a_file_is_told_its_directory(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).touch()
    for where, told in ((f"{SINGLE_NAME}, byte 3", f"{tmp_path}/{SINGLE_NAME}, byte 3"), ("elsewhere", "elsewhere")):
        with pytest.raises(CheckpointError) as caught, open_weights(weight_files(tmp_path)):
            raise CheckpointError("it cannot be read", where=where)
        assert caught.value.where == told
