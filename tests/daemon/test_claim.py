"""The claim on a place, with real files, locks and sockets: one holder, no file that is not ours touched, never
absent.
"""

import os
import select
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forked import in_child
from tests.support.listeners import listening_as
from tests.support.unprivileged import NOBODY, ROOT
from weightcached.daemon.claim import Claim, take
from weightcached.protocol.errors import InvalidPlace, PlaceTaken, UntrustedDaemon
from weightcached.protocol.peers import AllowList, peer_of
from weightcached.protocol.places import Place

NOBODY_ELSE = AllowList()


@pytest.fixture
def place(runtime_dir: Path) -> Place:
    return Place(runtime_dir, "default", "host-tp0of1")


def claim_and_listen(place: Place) -> tuple[Claim, socket.socket]:
    claim = take(place, NOBODY_ELSE)
    return claim, claim.listen(mode=0o600)


def test_directories_are_made_for_others_to_enter_whatever_the_umask(place: Place) -> None:
    umask = os.umask(0o077)
    try:
        take(place, NOBODY_ELSE).release()
    finally:
        os.umask(umask)
    for directory in (place.runtime_dir, place.directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755


def test_a_directory_that_others_can_write_is_refused(place: Place) -> None:
    place.runtime_dir.mkdir(mode=0o777)
    place.runtime_dir.chmod(0o777)
    with pytest.raises(UntrustedDaemon):
        take(place, NOBODY_ELSE)
    assert list(place.runtime_dir.iterdir()) == []


def test_the_second_claim_names_the_first_and_changes_nothing(place: Place) -> None:
    claim, listener = claim_and_listen(place)
    before = place.socket_path.stat()
    with pytest.raises(PlaceTaken, match=f"pid {os.getpid()}"):
        take(place, NOBODY_ELSE)
    assert os.path.samestat(before, place.socket_path.stat())
    listener.close()
    claim.release()
    take(place, NOBODY_ELSE).release()


def test_the_lock_file_stays(place: Place) -> None:
    claim, listener = claim_and_listen(place)
    before = place.lock_path.stat()
    listener.close()
    assert claim.unlink()
    claim.release()
    assert os.path.samestat(before, place.lock_path.stat())
    assert not place.socket_path.exists()


def test_nobody_else_can_open_the_lock(place: Place) -> None:
    take(place, NOBODY_ELSE).release()
    assert stat.S_IMODE(place.lock_path.stat().st_mode) == 0o600


def test_a_lock_file_replaced_while_we_lock_it_is_not_ours(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between open and flock somebody puts another file there: the lock on the old one protects nothing."""
    import fcntl

    take(place, NOBODY_ELSE).release()
    old = place.lock_path.stat()
    flock = fcntl.flock
    replaced: list[int] = []

    def flock_after_replacing(fd: int, operation: int) -> None:
        if not replaced:
            aside = place.lock_path.with_suffix(".aside")
            aside.touch(mode=0o600)
            os.rename(aside, place.lock_path)
            replaced.append(fd)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_replacing)
    claim = take(place, NOBODY_ELSE)
    try:
        assert replaced
        assert not os.path.samestat(old, place.lock_path.stat())
        with pytest.raises(PlaceTaken):  # what is locked is what is there now
            take(place, NOBODY_ELSE)
    finally:
        claim.release()


def test_a_living_daemon_whose_lock_file_was_removed_is_not_replaced(place: Place) -> None:
    claim, listener = claim_and_listen(place)
    before = place.socket_path.stat()
    place.lock_path.unlink()
    second = take(place, NOBODY_ELSE)
    try:
        with pytest.raises(PlaceTaken, match=f"pid {os.getpid()}"):
            second.listen(mode=0o600)
        assert os.path.samestat(before, place.socket_path.stat())
    finally:
        second.release()
        listener.close()
        claim.release()


def test_a_successors_socket_is_not_unlinked(place: Place) -> None:
    first, listener = claim_and_listen(place)
    listener.close()  # its process is on its way out, but has not cleaned up
    first.release()
    second, successor = claim_and_listen(place)
    assert not first.unlink()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place.socket_path))
    successor.close()
    second.release()


def test_a_file_that_is_not_a_socket_is_left_alone(place: Place) -> None:
    claim = take(place, NOBODY_ELSE)
    place.socket_path.write_text("somebody's notes")
    with pytest.raises(InvalidPlace, match="not a socket"):
        claim.listen(mode=0o600)
    assert place.socket_path.read_text() == "somebody's notes"
    claim.release()


def test_a_socket_left_half_bound_is_cleared_by_the_next_holder(place: Place) -> None:
    take(place, NOBODY_ELSE).release()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(place.binding_path))
    left.close()
    claim, listener = claim_and_listen(place)
    assert not place.binding_path.exists()
    listener.close()
    claim.release()


def test_the_socket_has_its_mode_from_the_start(place: Place) -> None:
    claim = take(place, NOBODY_ELSE)
    listener = claim.listen(mode=0o640)
    assert stat.S_IMODE(place.socket_path.stat().st_mode) == 0o640
    listener.close()
    claim.release()


RESTARTS = 1000
RESTARTING = f"""
import sys
from pathlib import Path
from weightcached.daemon.claim import take
from weightcached.protocol.peers import AllowList, peer_of
from weightcached.protocol.places import Place
place = Place(Path(sys.argv[1]), "default", "host-tp0of1")
for number in range({RESTARTS}):
    claim = take(place, AllowList())
    listener = claim.listen(mode=0o600)
    if number == 0:
        print("up", flush=True)
        sys.stdin.readline()
    listener.close()  # as a killed daemon leaves it: the path stays, the lock is the kernel's to release
    claim.release()
print("done", flush=True)
"""


def test_a_thousand_restarts_never_leave_the_path_absent(place: Place) -> None:
    """A client in a tight loop: refused and reset are what a dead daemon looks like, absent would mean "load from
    disk".
    """
    command = [sys.executable, "-c", RESTARTING, str(place.runtime_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as restarting:
        assert restarting.stdin is not None
        assert restarting.stdout is not None
        assert restarting.stdout.readline() == "up\n"
        restarting.stdin.write("go\n")
        restarting.stdin.flush()
        outcomes = {"connected": 0, "refused": 0}
        inodes = set()
        while not select.select([restarting.stdout], [], [], 0)[0]:
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    client.connect(str(place.socket_path))  # FileNotFoundError fails the test
                    outcomes["connected"] += 1
                except ConnectionRefusedError:
                    outcomes["refused"] += 1
            inodes.add(os.lstat(place.socket_path).st_ino)
        assert restarting.stdout.readline() == "done\n"
    assert restarting.returncode == 0
    assert outcomes["connected"] > 10, outcomes  # beside it, whoever restarts has to have a processor, too
    assert len(inodes) > 1, "the loop saw only one daemon"


def test_of_two_daemons_racing_for_a_place_one_wins(place: Place) -> None:
    """Processes that all start at once, many times over: exactly one holds the place, the others name it."""
    racer = (
        "import sys\n"
        "from pathlib import Path\n"
        "from weightcached.daemon.claim import take\n"
        "from weightcached.protocol.errors import PlaceTaken\n"
        "from weightcached.protocol.peers import AllowList\n"
        "from weightcached.protocol.places import Place\n"
        "place = Place(Path(sys.argv[1]), 'default', 'host-tp0of1')\n"
        "print('here', flush=True)\n"
        "for line in sys.stdin:\n"
        "    claim = None\n"
        "    try:\n"
        "        claim = take(place, AllowList())\n"
        "        listener = claim.listen(mode=0o600)\n"
        "        print('won', flush=True)\n"
        "    except PlaceTaken as error:\n"
        "        print('lost', error.found, flush=True)\n"
        "    sys.stdin.readline()\n"
        "    if claim is not None:\n"
        "        listener.close(); claim.unlink(); claim.release()\n"
        "    print('over', flush=True)\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", racer, str(place.runtime_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(3)
    ]

    def say(word: str) -> list[str]:
        for one in racers:
            one.stdin.write(f"{word}\n")  # type: ignore[union-attr]
            one.stdin.flush()  # type: ignore[union-attr]
        return [one.stdout.readline().strip() for one in racers]  # type: ignore[union-attr]

    try:
        assert [one.stdout.readline() for one in racers] == ["here\n"] * 3  # type: ignore[union-attr]
        for _ in range(50):
            answers = say("go")
            winners = [one.pid for one, answer in zip(racers, answers, strict=True) if answer == "won"]
            assert len(winners) == 1, answers
            # A loser may look before the winner has written its name; then it says so.
            assert set(answers) <= {
                "won",
                f"lost pid {winners[0]}, place default/host-tp0of1",
                "lost a daemon that has only just taken it",
            }
            assert say("end") == ["over"] * 3
    finally:
        for one in racers:
            one.kill()
            one.communicate()


def test_missing_parents_are_made(runtime_dir: Path) -> None:
    place = Place(runtime_dir / "a" / "b", "default", "host-tp0of1")
    take(place, NOBODY_ELSE).release()
    assert stat.S_IMODE((runtime_dir / "a").stat().st_mode) == 0o755


def test_a_parent_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidPlace, match="choose another --runtime-dir"):
        take(Place(tmp_path / "file" / "run", "d", "host-tp0of1"), NOBODY_ELSE)


# A listener that a vault kept


def test_a_kept_listener_is_gone_on_with(place: Place) -> None:
    first, listener = claim_and_listen(place)
    device, inode = first.bound
    first.leave()
    assert not first.unlink(), "the file stays"
    first.release()
    second = take(place, NOBODY_ELSE)
    assert second.adopt(listener, device=device, inode=inode, mode=0o666)
    assert stat.S_IMODE(place.socket_path.stat().st_mode) == 0o666
    assert second.bound == (device, inode)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place.socket_path))
        listener.accept()[0].close()
    assert second.unlink()
    assert not place.socket_path.exists()
    second.release()
    listener.close()


def test_peers_of_a_kept_listener_see_who_serves_now(place: Place) -> None:
    """Not the process that bound it, which is dead: its pid may be anybody's by now."""
    program = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.bind(sys.argv[2]); s.listen()"
    place.directory.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        command = [sys.executable, "-c", program, str(listener.fileno()), str(place.socket_path)]
        subprocess.run(command, pass_fds=[listener.fileno()], check=True)
        found = place.socket_path.stat()
        claim = take(place, NOBODY_ELSE)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(place.socket_path))
            assert peer_of(client).pid != os.getpid()
        assert claim.adopt(listener, device=found.st_dev, inode=found.st_ino, mode=0o600)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(place.socket_path))
            assert peer_of(client).pid == os.getpid()
        claim.release()


@pytest.mark.parametrize("there", ["nothing", "another socket", "a plain file"])
def test_a_kept_listener_that_is_not_behind_the_path_is_not_used(place: Place, there: str) -> None:
    first, listener = claim_and_listen(place)
    device, inode = first.bound
    place.socket_path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        if there == "another socket":
            other.bind(str(place.socket_path))
        elif there == "a plain file":
            place.socket_path.write_text("")
        assert not first.adopt(listener, device=device, inode=inode, mode=0o666)
    assert place.socket_path.exists() == (there != "nothing")
    listener.close()
    first.release()


def test_an_orphaned_socket_file_is_removed_and_a_listening_one_is_not(place: Place) -> None:
    first, listener = claim_and_listen(place)
    first.leave()
    with pytest.raises(PlaceTaken, match="listens at its path"):
        first.remove_orphan()
    listener.close()
    assert first.remove_orphan()
    assert not first.remove_orphan()
    place.socket_path.write_text("")
    with pytest.raises(InvalidPlace):
        first.remove_orphan()
    first.release()


# What others may have put there


@pytest.fixture
def victim(runtime_dir: Path) -> Path:
    """Somebody's file, which must stay as it is."""
    victim = runtime_dir.parent / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    return victim


def _link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def _dangling(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("nothing"))


def _hard_link(path: Path, victim: Path) -> None:
    os.link(victim, path)


def _fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def _open_to_others(path: Path, victim: Path) -> None:
    path.touch()
    path.chmod(0o644)


PLANTS = [
    *[("lock_path", make) for make in (_link, _dangling, _hard_link, _fifo, _open_to_others)],
    *[("socket_path", make) for make in (_link, _dangling, _hard_link, _fifo)],
    *[("binding_path", make) for make in (_link, _dangling, _hard_link, _fifo)],
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("where", "make"), PLANTS, ids=lambda value: str(getattr(value, "__name__", value)))
def test_nothing_that_is_planted_is_followed_waited_for_or_written_to(
    place: Place, victim: Path, where: str, make: Callable[[Path, Path], None]
) -> None:
    place.directory.mkdir(parents=True)
    path: Path = getattr(place, where)
    make(path, victim)
    before = os.lstat(path)
    with pytest.raises((InvalidPlace, UntrustedDaemon)) as refused:
        claim_and_listen(place)
    assert str(path) in str(refused.value)
    assert os.path.samestat(before, os.lstat(path))
    assert victim.read_text() == "precious"
    assert not victim.with_name("nothing").exists()
    assert sorted(found.name for found in place.directory.iterdir() if found != place.lock_path) == (
        [] if where == "lock_path" else [path.name]
    )


@pytest.mark.parametrize("level", ["runtime_dir", "directory"])
@pytest.mark.parametrize("target", ["there", "not there"])
def test_a_directory_that_is_a_link_is_refused(place: Place, level: str, target: str) -> None:
    elsewhere = place.runtime_dir.parent / "elsewhere"
    if target == "there":
        elsewhere.mkdir()
    directory: Path = getattr(place, level)
    directory.parent.mkdir(exist_ok=True)
    directory.symlink_to(elsewhere)
    with pytest.raises(UntrustedDaemon, match="not a directory"):
        take(place, NOBODY_ELSE)
    assert not elsewhere.exists() or list(elsewhere.iterdir()) == []


def test_on_a_way_that_others_could_change_nothing_is_made(runtime_dir: Path) -> None:
    runtime_dir.mkdir()
    runtime_dir.chmod(0o777)
    place = Place(runtime_dir / "a" / "b", "default", "host-tp0of1")
    with pytest.raises(UntrustedDaemon, match="on the way"):
        take(place, NOBODY_ELSE)
    assert list(runtime_dir.iterdir()) == []


@pytest.mark.root
class TestOfAnotherUser:
    """Members of a group that may write to the directory, and is on the allow-list, plant what they like there."""

    GROUP = 4242
    TRUSTED = AllowList(gids={GROUP})

    @pytest.fixture
    def shared(self, place: Place) -> Place:
        place.runtime_dir.parent.chmod(0o755)
        place.directory.mkdir(parents=True)
        os.chown(place.directory, 0, self.GROUP)
        place.directory.chmod(0o2775)
        return place

    def plant(self, work: Callable[[], object]) -> None:
        def as_member() -> None:
            os.setgroups([self.GROUP])
            os.setresuid(NOBODY, NOBODY, NOBODY)
            work()

        in_child(as_member)

    @pytest.mark.parametrize("make", [_link, _dangling, _fifo, _open_to_others])
    @pytest.mark.parametrize("where", ["lock_path", "socket_path", "binding_path"])
    def test_what_they_plant_is_refused(
        self, shared: Place, victim: Path, where: str, make: Callable[[Path, Path], None]
    ) -> None:
        path: Path = getattr(shared, where)
        self.plant(lambda: make(path, victim))
        with pytest.raises((InvalidPlace, UntrustedDaemon)):
            take(shared, self.TRUSTED).listen(mode=0o600)
        assert victim.read_text() == "precious"
        assert os.lstat(path).st_uid == NOBODY

    def test_a_lock_that_they_hold_keeps_no_daemon_from_saying_what_is_wrong(self, shared: Place) -> None:
        self.plant(lambda: os.close(os.open(shared.lock_path, os.O_CREAT, 0o600)))
        with pytest.raises(UntrustedDaemon, match=f"uid {NOBODY}"):
            take(shared, self.TRUSTED)

    def test_who_listens_there_is_named(self, shared: Place) -> None:
        shared.directory.chmod(0o777)
        with listening_as(NOBODY, shared.socket_path):
            shared.directory.chmod(0o755)
            claim = take(shared, NOBODY_ELSE)
            with pytest.raises(PlaceTaken, match=f"uid {NOBODY}"):
                claim.listen(mode=0o600)
            claim.release()

    @pytest.mark.parametrize("level", ["runtime_dir", "directory", "above"])
    def test_in_their_own_directory_nothing_is_made(self, place: Place, level: str) -> None:
        place.directory.mkdir(parents=True)
        theirs = {"above": place.runtime_dir.parent}.get(level) or getattr(place, level)
        os.chown(theirs, NOBODY, NOBODY)
        with pytest.raises(UntrustedDaemon, match=f"uid {NOBODY}"):
            take(place, NOBODY_ELSE)
        assert list(place.directory.iterdir()) == []
        take(place, AllowList(uids={NOBODY})).release()
