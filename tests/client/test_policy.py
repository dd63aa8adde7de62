"""The contract's first rows as a pure table: two system calls' answers in, what to do out."""

import errno
import socket
import stat
from pathlib import Path

import pytest

from weightcached.client.policy import Entry, Finding, absence, absent, judge, refused
from weightcached.protocol.errors import DaemonAbsent, DaemonUnreachable, InvalidPlace

PATH = Path("/run/weightcached/default/host-tp0of1.sock")
SOCKET = Entry(mode=stat.S_IFSOCK | 0o666)
FILE = Entry(mode=stat.S_IFREG | 0o644)
LINK = Entry(mode=stat.S_IFLNK | 0o777)
NOTHING = Entry(error=errno.ENOENT)


@pytest.mark.parametrize(
    ("connect_error", "entry", "finding"),
    [
        (0, SOCKET, Finding.CONNECTED),
        (0, NOTHING, Finding.CONNECTED),  # the daemon removed its socket after we connected
        (errno.ENOENT, NOTHING, Finding.ABSENT),
        (errno.ENOENT, SOCKET, Finding.CHANGED),  # bound between the two calls
        (errno.ECONNREFUSED, SOCKET, Finding.REFUSED),
        (errno.ECONNREFUSED, NOTHING, Finding.CHANGED),  # stopped and removed between the two calls
        (errno.EAGAIN, SOCKET, Finding.BUSY),
        (errno.EAGAIN, NOTHING, Finding.BUSY),
    ],
)
def test_what_is_found_decides(connect_error: int, entry: Entry, finding: Finding) -> None:
    assert judge(connect_error, entry, PATH) is finding


@pytest.mark.parametrize(
    ("connect_error", "entry"),
    [
        (errno.ECONNREFUSED, FILE),  # what connecting to a plain file says
        (0, LINK),
        (errno.ENOENT, LINK),  # dangling
        (errno.ENOENT, FILE),
        (errno.ENOTDIR, Entry(error=errno.ENOTDIR)),
        (errno.ELOOP, LINK),
        (errno.EACCES, SOCKET),
        (errno.EACCES, Entry(error=errno.EACCES)),
        (errno.ENOENT, Entry(error=errno.EACCES)),
        (errno.ENAMETOOLONG, Entry(error=errno.ENAMETOOLONG)),
        (errno.EPROTOTYPE, SOCKET),
    ],
)
def test_what_can_be_no_place_is_said_so(connect_error: int, entry: Entry) -> None:
    with pytest.raises(InvalidPlace) as caught:
        judge(connect_error, entry, PATH)
    assert caught.value.where == PATH
    assert caught.value.expected
    assert caught.value.found
    assert caught.value.next_step


def test_absence_is_one_answer_only() -> None:
    """Of all pairs of answers, one is an absent daemon: ENOENT from `connect` and then from `lstat`."""
    entries = [SOCKET, FILE, LINK, *(Entry(error=number) for number in errno.errorcode)]
    absent_pairs = []
    for number in (0, *errno.errorcode):
        for entry in entries:
            try:
                if judge(number, entry, PATH) is Finding.ABSENT:
                    absent_pairs.append((number, entry))
            except (InvalidPlace, DaemonUnreachable):
                continue
    assert absent_pairs == [(errno.ENOENT, NOTHING)]


def test_lstat_looks_at_the_link_itself(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert stat.S_ISLNK(Entry.at(tmp_path / "link").mode or 0)
    assert Entry.at(tmp_path / "nothing").absent
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert Entry.at(tmp_path / "s").is_socket


def test_messages_name_the_path_and_what_is_near() -> None:
    near = [Path("/run/weightcached/other/host-tp0of1.sock")]
    assert str(PATH) in absence(PATH, near)
    assert str(near[0]) in absence(PATH, near)
    assert "none" in absence(PATH, [])
    error = absent(PATH, near, instead="do something else")
    assert isinstance(error, DaemonAbsent)
    assert str(near[0]) in str(error)
    assert "do something else" in str(error)
    assert str(PATH) in str(refused(PATH))
