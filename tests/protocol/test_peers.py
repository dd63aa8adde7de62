"""Whom to trust: credentials of the other end, owners and modes of directory and socket, as root and as nobody."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked import in_child
from tests.support.unprivileged import NOBODY, folder_for_everyone
from weightcached.protocol.errors import UntrustedDaemon
from weightcached.protocol.peers import (
    AllowList,
    Peer,
    check_daemon,
    check_directory,
    check_socket_owner,
    peer_of,
)

NO_ONE_ELSE = AllowList()
OTHER = 12345


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_for_everyone() as folder:
        yield folder


def refused(check, *arguments) -> UntrustedDaemon:
    with pytest.raises(UntrustedDaemon) as raised:
        check(*arguments)
    return raised.value


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert peer_of(near) == Peer(os.getpid(), os.geteuid(), os.getegid())


@pytest.mark.root
def test_each_side_sees_the_others_credentials(folder: Path) -> None:
    """The listener's are those of whoever called listen; the client's those of whoever called connect."""
    path = folder / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o666)

        def connect() -> None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                peer = peer_of(connection)
                assert (peer.uid, peer.gid, peer.pid) == (0, 0, os.getppid())
                check_daemon(peer, path, NO_ONE_ELSE)

        in_child(connect, uid=NOBODY)
        accepted, _ = listener.accept()
        with accepted:
            peer = peer_of(accepted)
    assert (peer.uid, peer.gid) == (NOBODY, NOBODY)
    assert not NO_ONE_ELSE.admits(peer)
    assert AllowList(uids={NOBODY}).admits(peer)
    assert AllowList(gids={NOBODY}).admits(peer)
    assert not AllowList(uids={OTHER}, gids={OTHER}).admits(peer)


@pytest.mark.root
@pytest.mark.parametrize("count", [0, 1, 300, 40_000])
def test_a_group_beside_its_own_admits_a_peer(folder: Path, count: int) -> None:
    """However many it has: Python's own ``getsockopt`` ends at 256."""
    groups = range(100_000, 100_000 + count)
    path = folder / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o666)

        def connect() -> None:
            os.setgroups(groups)
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))

        in_child(connect)
        accepted, _ = listener.accept()
        with accepted:
            peer = peer_of(accepted)
    assert peer == Peer(peer.pid, NOBODY, NOBODY)
    assert peer.groups == frozenset(groups)
    assert AllowList(gids=groups[-1:]).admits(peer) == bool(count)
    assert not AllowList(gids={OTHER}).admits(peer)


def test_a_socket_that_nobody_is_connected_to_has_no_groups(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as alone:
        assert peer_of(alone).groups == frozenset()


@pytest.mark.root
def test_root_and_oneself_are_always_admitted_and_nobody_else() -> None:
    def check() -> None:
        assert NO_ONE_ELSE.admits(Peer(1, 0, 0))
        assert NO_ONE_ELSE.admits(Peer(1, NOBODY, OTHER))
        assert not NO_ONE_ELSE.admits(Peer(1, OTHER, NOBODY))

    in_child(check, uid=NOBODY)


@pytest.mark.root
def test_a_group_admits_peers_but_not_owners(folder: Path) -> None:
    """The owner of a directory can put anything there; a group on the list may only ask."""
    allowed = AllowList(gids={OTHER})
    os.chown(folder, OTHER, OTHER)
    refused(check_directory, folder, allowed)
    refused(check_daemon, Peer(1, OTHER, OTHER), folder, allowed)


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o711, 0o2755, 0o1755])
def test_a_directory_of_ours_that_only_we_can_write_to_is_trusted(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    check_directory(folder, NO_ONE_ELSE)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(folder: Path, mode: int) -> None:
    """Sticky too: it keeps people from removing our socket, not from being there first."""
    folder.chmod(mode)
    error = refused(check_directory, folder, AllowList(uids={os.geteuid()}, gids={os.getegid()}))
    assert "chmod go-w" in str(error)
    assert str(folder) in str(error)


@pytest.mark.parametrize("mode", [0o775, 0o770, 0o2775])
def test_a_directory_that_a_group_can_write_to_is_refused_unless_the_group_is_allowed(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    refused(check_directory, folder, NO_ONE_ELSE)
    refused(check_directory, folder, AllowList(gids={OTHER}))
    check_directory(folder, AllowList(gids={folder.stat().st_gid}))


@pytest.mark.parametrize("level", ["above", "far above"])
@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
def test_a_directory_that_others_can_exchange_is_refused(folder: Path, level: str, mode: int) -> None:
    """Theirs to rename is as good as theirs to write to."""
    directory = folder / "far" / "near" / "run"
    directory.mkdir(parents=True)
    writable = directory.parent if level == "above" else directory.parent.parent
    writable.chmod(mode)
    error = refused(check_directory, directory, NO_ONE_ELSE)
    assert str(error.where) == str(writable)
    writable.chmod(mode | 0o1000)  # sticky: what is ours stays
    check_directory(directory, NO_ONE_ELSE)
    writable.chmod(0o775)
    check_directory(directory, AllowList(gids={writable.stat().st_gid}))


@pytest.mark.root
def test_a_directory_below_someone_elses_is_refused_unless_allowed(folder: Path) -> None:
    directory = folder / "theirs" / "run"
    directory.mkdir(parents=True)
    os.chown(directory.parent, OTHER, OTHER)
    assert f"uid {OTHER}" in str(refused(check_directory, directory, NO_ONE_ELSE))
    check_directory(directory, AllowList(uids={OTHER}))
    in_child(lambda: check_directory(directory, NO_ONE_ELSE), uid=OTHER)


@pytest.mark.parametrize("target", ["real", "../{}/real", "{}/hop", "hop"])
def test_links_on_the_way_are_followed_and_looked_at(folder: Path, target: str) -> None:
    (folder / "real" / "run").mkdir(parents=True)
    (folder / "hop").symlink_to(folder / "real")
    (folder / "link").symlink_to(target.format(folder if target.startswith("{") else folder.name))
    check_directory(folder / "link" / "run", NO_ONE_ELSE)
    check_directory(folder / "link" / ".." / "real" / "run", NO_ONE_ELSE)
    (folder / "real").chmod(0o777)
    refused(check_directory, folder / "link" / "run", NO_ONE_ELSE)


@pytest.mark.root
def test_a_link_on_the_way_that_someone_else_made_is_refused(folder: Path) -> None:
    """It leads to a directory of ours now, and elsewhere in a moment."""
    (folder / "real" / "run").mkdir(parents=True)
    folder.chmod(0o1777)
    in_child(lambda: os.symlink(folder / "real", folder / "link"), uid=NOBODY)
    assert f"uid {NOBODY}" in str(refused(check_directory, folder / "link" / "run", NO_ONE_ELSE))
    check_directory(folder / "link" / "run", AllowList(uids={NOBODY}))
    (folder / "hop").symlink_to(folder / "link")
    refused(check_directory, folder / "hop" / "run", NO_ONE_ELSE)


def test_a_way_without_end_ends(folder: Path) -> None:
    (folder / "one").symlink_to(folder / "two")
    (folder / "two").symlink_to(folder / "one")
    with pytest.raises(OSError, match="Too many levels"):
        check_directory(folder / "one" / "run", NO_ONE_ELSE)


@pytest.mark.root
def test_a_directory_of_someone_else_is_refused_unless_allowed(folder: Path) -> None:
    os.chown(folder, OTHER, OTHER)
    error = refused(check_directory, folder, NO_ONE_ELSE)
    assert f"uid {OTHER}" in str(error)
    check_directory(folder, AllowList(uids={OTHER}))
    in_child(lambda: refused(check_directory, folder, NO_ONE_ELSE), uid=NOBODY)
    in_child(lambda: check_directory(folder, NO_ONE_ELSE), uid=OTHER)


@pytest.mark.root
def test_roots_directory_is_trusted_by_everyone(folder: Path) -> None:
    in_child(lambda: check_directory(folder, NO_ONE_ELSE), uid=NOBODY)


def test_a_link_to_a_good_directory_is_refused(folder: Path) -> None:
    good = folder / "good"
    good.mkdir(mode=0o755)
    (folder / "link").symlink_to(good)
    check_directory(good, NO_ONE_ELSE)
    refused(check_directory, folder / "link", NO_ONE_ELSE)


def test_what_is_not_a_directory_is_refused_and_what_is_missing_is_missing(folder: Path) -> None:
    (folder / "file").touch()
    refused(check_directory, folder / "file", NO_ONE_ELSE)
    with pytest.raises(FileNotFoundError):
        check_directory(folder / "missing", NO_ONE_ELSE)


@pytest.mark.root
def test_a_planted_socket_is_refused_unless_its_owner_is_allowed(folder: Path) -> None:
    path = folder / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    check_socket_owner(path, os.lstat(path), NO_ONE_ELSE)
    os.chown(path, OTHER, OTHER)
    error = refused(check_socket_owner, path, os.lstat(path), NO_ONE_ELSE)
    assert f"uid {OTHER}" in str(error)
    assert str(path) in str(error)
    check_socket_owner(path, os.lstat(path), AllowList(uids={OTHER}))


def test_a_listening_process_of_someone_else_is_refused_and_named() -> None:
    path = Path("/run/x.sock")
    check_daemon(Peer(7, os.geteuid(), OTHER), path, NO_ONE_ELSE)
    check_daemon(Peer(7, 0, 0), path, NO_ONE_ELSE)
    check_daemon(Peer(7, OTHER, 0), path, AllowList(uids={OTHER}))
    assert "pid 7, uid 12345" in str(refused(check_daemon, Peer(7, OTHER, 0), path, NO_ONE_ELSE))
