"""The contract's rows about what is found at the path, each with the real thing there.

Rows about other users need root: clients and listeners run as users without rights.
"""

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.forked import in_child
from tests.support.listeners import listening_as
from tests.support.unprivileged import NOBODY, folder_for_everyone
from weightcached.client import WeightSet, attach
from weightcached.client.connect import reach
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonNotReady,
    DaemonUnreachable,
    InvalidOption,
    InvalidPlace,
    UntrustedDaemon,
)
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place
from weightcached.protocol.testing import HonestGrant, LyingDaemon, Receive, ReceiveToEnd, Step

Serve = Callable[..., AbstractContextManager[LyingDaemon]]
Attached = Callable[..., WeightSet]

STRANGER = 65533


@pytest.mark.parametrize("missing", ["socket", "directory", "runtime directory"])
def test_absent_is_an_error_where_a_daemon_is_required(missing: str, place: Place, attached: Attached) -> None:
    if missing != "socket":
        place.directory.rmdir()
    if missing == "runtime directory":
        place.runtime_dir.rmdir()
    with pytest.raises(DaemonAbsent) as caught:
        attached()
    assert str(place.socket_path) in str(caught.value)
    place.directory.mkdir(parents=True, exist_ok=True)


def test_an_absent_place_names_the_sockets_near_it(place: Place, attached: Attached) -> None:
    other = Place(place.runtime_dir, "other", place.device)
    other.directory.mkdir()
    with listening(other.socket_path), pytest.raises(DaemonAbsent, match=str(other.socket_path)):
        attached()


@contextmanager
def listening(path: Path, *, backlog: int = 128, kind: int = socket.SOCK_STREAM) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(path))
        if kind == socket.SOCK_STREAM:
            listener.listen(backlog)
        yield listener
    path.unlink(missing_ok=True)


def _plain_file(path: Path) -> None:
    path.write_bytes(b"")


def _dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("mode", ["client", "require"])
@pytest.mark.parametrize("make", [_plain_file, Path.mkdir, _dangling_link, _loop, _fifo])
def test_something_else_than_a_socket(
    make: Callable[[Path], None], mode: str, place: Place, attached: Attached
) -> None:
    make(place.socket_path)
    with pytest.raises(InvalidPlace, match=str(place.socket_path)):
        attached(mode=mode)


def test_a_link_to_a_listening_socket(place: Place, attached: Attached) -> None:
    elsewhere = place.directory / "elsewhere"
    place.socket_path.symlink_to(elsewhere)
    with listening(elsewhere), pytest.raises(InvalidPlace, match="symbolic link"):
        attached()


def test_a_datagram_socket(place: Place, attached: Attached) -> None:
    with listening(place.socket_path, kind=socket.SOCK_DGRAM), pytest.raises(InvalidPlace, match="another type"):
        attached()


@pytest.mark.parametrize("mode", ["client", "require"])
def test_a_file_where_the_directory_should_be(mode: str, place: Place, attached: Attached) -> None:
    place.directory.rmdir()
    place.directory.write_bytes(b"")
    with pytest.raises(InvalidPlace, match="Not a directory"):
        attached(mode=mode)


def test_a_directory_that_is_a_loop_of_links(place: Place, attached: Attached) -> None:
    place.directory.rmdir()
    place.directory.symlink_to(place.directory)
    with pytest.raises(InvalidPlace, match="symbolic links"):
        attached(mode="client")


def test_a_path_that_is_too_long_is_found_before_anything_is_tried(model: Path) -> None:
    with pytest.raises(InvalidPlace, match="too long"):
        attach(model, runtime_dir="/tmp/" + "x" * 100)


@pytest.mark.parametrize("mode", ["client", "require"])
def test_a_socket_whose_daemon_died(mode: str, place: Place, attached: Attached) -> None:
    with listening(place.socket_path):
        pass
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place.socket_path))
    with pytest.raises(DaemonUnreachable, match="died after binding"):
        attached(mode=mode)


def test_a_full_backlog_is_waited_for_and_then_not_ready(place: Place, attached: Attached) -> None:
    with listening(place.socket_path, backlog=0), socket.socket(socket.AF_UNIX) as first:
        first.connect(str(place.socket_path))
        started_s = time.monotonic()
        with pytest.raises(DaemonNotReady, match="backlog"):
            attached(timeout_s=0.3)
        assert 0.3 <= time.monotonic() - started_s < 2


def test_room_in_the_backlog_is_used_as_soon_as_there_is_some(place: Place) -> None:
    with listening(place.socket_path, backlog=0) as listener, socket.socket(socket.AF_UNIX) as first:
        first.connect(str(place.socket_path))
        timer = threading.Timer(0.1, lambda: listener.accept()[0].close())
        timer.start()
        connection = _reach(place)
        timer.join()
        assert connection is not None
        connection.close()


def _reach(place: Place, *, appear_s: float = 0.0) -> socket.socket | None:
    return reach(place, allowed=AllowList(), deadline=Deadline.after(10), appear_by=Deadline.after(appear_s), lost=None)


@pytest.mark.parametrize("missing", ["socket", "runtime directory"])
def test_a_socket_that_appears_while_it_is_waited_for(
    missing: str, grant: HonestGrant, place: Place, attached: Attached
) -> None:
    if missing == "runtime directory":
        place.directory.rmdir()
        place.runtime_dir.rmdir()
    script: list[Step] = [Receive(), grant.step(), ReceiveToEnd()]
    daemons = []

    def begin() -> None:
        place.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        daemons.append(LyingDaemon(place.socket_path, script).__enter__())

    timer = threading.Timer(0.15, begin)
    timer.start()
    with attached(wait_for_daemon_s=10) as weights:
        weights.verify()
    timer.join()
    daemons[0].__exit__(None, None, None)


def test_waiting_for_a_socket_ends(place: Place, attached: Attached) -> None:
    started_s = time.monotonic()
    with pytest.raises(DaemonAbsent):
        attached(wait_for_daemon_s=0.2)
    assert 0.2 <= time.monotonic() - started_s < 2
    with pytest.raises(DaemonAbsent):
        attached(wait_for_daemon_s=60, timeout_s=0.2)


def test_a_path_that_is_replaced_all_the_time_is_never_absent(place: Place) -> None:
    """Bind aside and rename, a thousand times under a connecting loop: connected or refused, never absent."""
    stop = threading.Event()
    replaced: list[None] = []

    def replace() -> None:
        previous: socket.socket | None = None
        while not stop.is_set():
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(place.binding_path))
            listener.listen()
            os.rename(place.binding_path, place.socket_path)
            if previous is not None:
                previous.close()
            previous = listener
            replaced.append(None)
        assert previous is not None
        previous.close()

    with listening(place.socket_path):
        thread = threading.Thread(target=replace)
        thread.start()
        seen = {"connected": 0, "refused": 0}
        while len(replaced) < 1000:
            try:
                connection = _reach(place)
                assert connection is not None, "absent"
                connection.close()
                seen["connected"] += 1
            except DaemonUnreachable:
                seen["refused"] += 1
        stop.set()
        thread.join()
    assert seen["connected"] > 0


@pytest.mark.parametrize("level", ["runtime_dir", "directory"])
@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777, 0o775])
def test_a_directory_that_others_can_write(
    level: str, mode: int, place: Place, grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    directory: Path = getattr(place, level)
    directory.chmod(mode)
    with serve(grant.step()) as daemon:
        with pytest.raises(UntrustedDaemon, match=str(directory)):
            attached()
        directory.chmod(0o755)
    assert not any(wire.messages for wire in daemon.wires)


def test_a_directory_whose_group_is_trusted(place: Place, grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    place.directory.chmod(0o775)
    group = place.directory.stat().st_gid
    with serve(grant.step()), attached(allow_gids=[group]) as weights:
        weights.verify()


@pytest.mark.root
@pytest.mark.parametrize("level", ["runtime_dir", "directory"])
def test_a_directory_of_a_stranger(
    level: str, place: Place, grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    directory: Path = getattr(place, level)
    os.chown(directory, NOBODY, NOBODY)
    with serve(grant.step()) as daemon, pytest.raises(UntrustedDaemon, match=f"uid {NOBODY}"):
        attached()
    assert not any(wire.messages for wire in daemon.wires)
    with serve(grant.step()), attached(allow_uids=[NOBODY]) as weights:
        weights.verify()


@pytest.mark.root
@pytest.mark.parametrize("from_step", ["bind", "listen"])
def test_a_socket_or_a_process_of_a_stranger_gets_no_byte(from_step: str, place: Place, attached: Attached) -> None:
    """`bind`: the socket file is the stranger's too. `listen`: the file is root's, only the process gives it away."""
    place.directory.chmod(0o777 if from_step == "bind" else 0o755)
    with listening_as(NOBODY, place.socket_path, from_step=from_step) as received:  # type: ignore[arg-type]
        place.directory.chmod(0o755)
        with pytest.raises(UntrustedDaemon, match=f"uid.*{NOBODY}") as caught:
            attached()
        assert received() == 0
    assert ("the process behind" in str(caught.value)) == (from_step == "listen")


@pytest.mark.root
def test_a_stranger_that_is_allowed(place: Place, attached: Attached) -> None:
    place.directory.chmod(0o777)
    with listening_as(NOBODY, place.socket_path) as received:
        place.directory.chmod(0o755)
        with pytest.raises(DaemonNotReady):  # trusted, and asked; it never answers
            attached(allow_uids=[NOBODY], timeout_s=0.1)
        assert received() > 0


@pytest.fixture
def open_model() -> Iterator[Path]:
    """A checkpoint that every user can read."""
    with folder_for_everyone() as folder:
        yield tiny_llama(folder / "model")


@pytest.mark.root
def test_a_user_without_rights_trusts_roots_daemon(
    open_model: Path, place: Place, grant: HonestGrant, serve: Serve
) -> None:
    with serve(grant.step()):
        place.socket_path.chmod(0o666)

        def work() -> None:
            with attach(open_model, mode="require", runtime_dir=place.runtime_dir, timeout_s=10) as weights:
                weights.verify()

        in_child(work, uid=NOBODY)


@pytest.mark.root
@pytest.mark.parametrize("closed", ["socket", "directory", "runtime_dir"])
def test_a_user_without_rights_at_a_closed_place(closed: str, open_model: Path, place: Place) -> None:
    """EACCES is not absence: no silent load from disk."""
    with listening(place.socket_path):
        place.socket_path.chmod(0o600 if closed == "socket" else 0o666)
        if closed != "socket":
            getattr(place, closed).chmod(0o700)

        def work() -> None:
            with pytest.raises(InvalidPlace, match="Permission denied"):
                attach(open_model, mode="client", runtime_dir=place.runtime_dir, timeout_s=10)

        in_child(work, uid=NOBODY)


@pytest.mark.root
def test_two_users_without_rights_do_not_trust_each_other(open_model: Path, place: Place) -> None:
    os.chown(place.directory, STRANGER, STRANGER)
    with listening_as(STRANGER, place.socket_path) as received:

        def work() -> None:
            with pytest.raises(UntrustedDaemon, match=f"uid {STRANGER}"):
                attach(open_model, mode="client", runtime_dir=place.runtime_dir, timeout_s=10)

        in_child(work, uid=NOBODY)
        assert received() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "daemon"},
        {"mode": ""},
        {"tp_size": 2},  # a rank is never defaulted
        {"tp_size": 2, "tp_rank": 2},
        {"tp_rank": -1},
        {"layout": "sideways"},
        {"dtype": "float8"},
        {"quantization": "int3"},
        {"digest": "short"},
        {"digest": "g" * 64},
        {"digest": "a" * 64, "want": "current"},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"wait_for_daemon_s": -1.0},
        {"runtime_dir": "relative"},
        {"name": "../x"},
        {"trusted_filesystems": ["floppyfs"]},
    ],
)
def test_options_that_cannot_be(options: dict[str, object], place: Place, attached: Attached) -> None:
    with pytest.raises(InvalidOption):
        attached(**options)
    assert stat.S_ISDIR(place.directory.stat().st_mode)


def test_a_model_that_is_nothing(place: Place, attached: Attached, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption):
        attach(tmp_path / "nothing", runtime_dir=place.runtime_dir)


@pytest.mark.parametrize(("size", "rank"), [(1.0, 0), (1, 0.0), ("1", 0), (0, 0), (2, 2), (10**30, 0)])
def test_a_rank_that_no_daemon_can_have_is_no_reason_to_load_from_disk(
    attached: Attached, size: object, rank: object
) -> None:
    """``host-tp0of1.0.sock`` is always absent, and what is absent is loaded from disk."""
    with pytest.raises(InvalidOption):
        attached(mode="client", tp_size=size, tp_rank=rank)


@pytest.mark.parametrize("want", ["", "\udcff", "x" * 2000, 3])
def test_a_want_that_no_daemon_can_be_asked_is_an_option_that_cannot_be_used(attached: Attached, want: object) -> None:
    with pytest.raises(InvalidOption):
        attached(want=want)
