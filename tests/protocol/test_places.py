"""Places: which words and paths are allowed, where everything of a place lies, what a runtime directory holds."""

import os
import socket
from pathlib import Path

import pytest

from weightcached.protocol.errors import InvalidOption, InvalidPlace
from weightcached.protocol.places import (
    DEFAULT_RUNTIME_DIR,
    Place,
    host_device,
    places_in,
    runtime_directory,
    sockets_near,
)


def test_paths_follow_from_directory_name_and_device() -> None:
    place = Place(Path("/run/weightcached"), "llama", host_device(tp_size=8, tp_rank=3))
    assert place.socket_path == Path("/run/weightcached/llama/host-tp3of8.sock")
    assert place.lock_path == Path("/run/weightcached/llama/host-tp3of8.lock")
    assert place.binding_path == Path("/run/weightcached/llama/host-tp3of8.sock.new")
    assert place.binding_path.parent == place.socket_path.parent  # or the rename would not be atomic
    assert str(place) == "llama/host-tp3of8"


def test_stages_and_expert_ranks_are_in_the_device_where_there_are_several() -> None:
    assert host_device(tp_size=2, tp_rank=0, pp_size=2, pp_rank=1) == "host-tp0of2-pp1of2"
    assert host_device(tp_size=1, tp_rank=0, ep_size=8, ep_rank=5) == "host-tp0of1-ep5of8"
    assert host_device(tp_size=2, tp_rank=1, pp_size=3, pp_rank=0, ep_size=4, ep_rank=3) == "host-tp1of2-pp0of3-ep3of4"


@pytest.mark.parametrize(
    "word",
    ["", ".", "..", ".hidden", "-option", "a/b", "/", "a b", "a\n", "a\0", "ü", "a*", "~", "$HOME"],
    ids=repr,
)
def test_words_that_could_leave_the_directory_are_refused(word: str) -> None:
    for name, device in ((word, "host"), ("default", word)):
        with pytest.raises(InvalidOption):
            Place(Path("/run/weightcached"), name, device)


@pytest.mark.parametrize("word", ["a", "A-b_c.d", "0", "_x", "GPU-8f0d3c4e-1b2a"])
def test_ordinary_words_are_accepted(word: str) -> None:
    assert Place(Path("/run"), word, word).socket_path == Path(f"/run/{word}/{word}.sock")


@pytest.mark.parametrize("filler", ["x", "ü"], ids=["ascii", "two bytes a letter"])
def test_the_longest_path_can_be_bound_and_no_longer_one_is_made(tmp_path: Path, filler: str) -> None:
    """The daemon binds the final name with a suffix; both have to fit in sun_path."""
    short = Place(tmp_path, "n", "d")
    room = 107 - len(os.fsencode(short.binding_path)) - 1
    directory = tmp_path / (filler * (room // len(os.fsencode(filler))))
    longest = Place(directory, "n", "d")
    longest.directory.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(longest.binding_path))
    with pytest.raises(InvalidPlace) as raised:
        Place(directory, "nn", "d" * 2)
    assert "at most 103 bytes" in str(raised.value)


def test_the_runtime_directory_comes_from_the_option_then_one_variable(monkeypatch) -> None:
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR", "RUNTIME_DIRECTORY", "HOME"):
        monkeypatch.setenv(variable, "/elsewhere")
    monkeypatch.delenv("WEIGHTCACHED_RUNTIME_DIR", raising=False)
    assert runtime_directory() == DEFAULT_RUNTIME_DIR == Path("/run/weightcached")
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", "/variable")
    assert runtime_directory() == Path("/variable")
    assert runtime_directory("/option") == Path("/option")
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", "")
    assert runtime_directory() == DEFAULT_RUNTIME_DIR


@pytest.mark.parametrize("option", ["relative", "./here", ""])
def test_a_relative_runtime_directory_is_refused(option: str) -> None:
    with pytest.raises(InvalidOption):
        runtime_directory(option)


@pytest.mark.parametrize(("size", "rank"), [(1, 1), (2, -1), (0, 0), (2, 2)])
def test_a_rank_out_of_range_has_no_device(size: int, rank: int) -> None:
    with pytest.raises(InvalidOption):
        host_device(tp_size=size, tp_rank=rank)
    for kind in ("pp", "ep"):
        with pytest.raises(InvalidOption):
            host_device(tp_size=1, tp_rank=0, **{f"{kind}_size": size, f"{kind}_rank": rank})


def test_the_places_of_a_directory_are_those_with_a_socket_or_a_lock(tmp_path: Path) -> None:
    for entry in ("b/host-tp0of1.sock", "a/host-tp1of2.lock", "a/host-tp1of2.sock", "a/host-tp0of2.lock"):
        (tmp_path / entry).parent.mkdir(exist_ok=True)
        (tmp_path / entry).touch()
    assert [str(place) for place in places_in(tmp_path)] == ["a/host-tp0of2", "a/host-tp1of2", "b/host-tp0of1"]
    assert sockets_near(Place(tmp_path, "c", "d")) == [tmp_path / "a/host-tp1of2.sock", tmp_path / "b/host-tp0of1.sock"]


def test_strangers_in_the_directory_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("with space", ".hidden", "a", "n" * 120):
        (tmp_path / name).mkdir()
        (tmp_path / name / "host.sock").touch()
    for entry in ("host.sock.new", "notes.txt", ".sock", "-x.lock"):
        (tmp_path / "a" / entry).touch()
    (tmp_path / "\x1b[2J\nforged").mkdir()
    (tmp_path / "\x1b[2J\nforged" / "host.sock").touch()
    assert [str(place) for place in places_in(tmp_path)] == ["a/host"]
    assert all(str(path).isprintable() for path in sockets_near(Place(tmp_path, "c", "d")))


def test_a_missing_directory_has_no_places(tmp_path: Path) -> None:
    assert places_in(tmp_path / "missing") == []
    assert sockets_near(Place(tmp_path / "missing", "a", "b")) == []


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidPlace):
        places_in(tmp_path / "loop")
