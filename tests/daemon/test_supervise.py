"""`weightcached supervise`, whole: a real supervisor process with a child that obeys, killed and handed back to.

The child (`tests/support/kept_child.py`) stands for a keeper; it speaks with the keeper's own modules.
"""

import itertools
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kept_child import sealed
from tests.support.resources import anonymous_nbytes, open_fds
from tests.support.supervised import BRIEF_CHILD, TIMEOUT_S, Life, Supervised, supervised
from weightcached.daemon.supervisor.backoff import BackOff
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.host import SEALS

MIB = 1024 * 1024


@pytest.fixture
def supervisor() -> Iterator[Supervised]:
    with supervised("--backoff-max", "0") as running:
        yield running


def kill_and_wait(life: Life, supervisor: Supervised) -> Life:
    life.kill()
    life.wait_dead()
    return supervisor.next_life()


def store(life: Life, **texts: str) -> None:
    for name, text in texts.items():
        life.ask("store", name=name, text=text)


# Keeping and handing back


def test_what_was_stored_is_handed_back_after_kill_minus_9(supervisor: Supervised) -> None:
    first = supervisor.next_life()
    assert first.handed == []
    inodes = {name: first.ask("store", name=name, text=f"bytes of {name}") for name in ("m", "g0.s0", "listener")}
    for _ in range(2):
        life = kill_and_wait(first, supervisor)
        assert life.pid != first.pid
        assert life.hello["environment"]["LISTEN_PID"] == str(life.pid)
        assert [each["fd"] for each in life.handed] == [3, 4, 5]
        assert [each["name"] for each in life.handed] == ["m", "g0.s0", "listener"], "not the order of storing"
        for each in life.handed:
            assert each["text"] == f"bytes of {each['name']}"
            assert each["inode"] == inodes[each["name"]]
            assert each["seals"] & SEALS == SEALS
            assert not each["inheritable"]
        assert life.hello["left"] == {}, "children of the keeper would take these for their own"
        first = life


def test_nothing_kept_is_nothing_said() -> None:
    with (
        open(os.devnull, "rb") as stranger,
        supervised(
            environment={"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "stale", "WATCHDOG_USEC": "1000000"},
            pass_fds=[stranger.fileno()],
        ) as supervisor,
    ):
        life = supervisor.next_life()
        assert life.hello["environment"] == {
            "NOTIFY_SOCKET": life.hello["environment"]["NOTIFY_SOCKET"],
            "WEIGHTCACHED_SUPERVISOR": str(supervisor.pid),
        }
        assert life.hello["supervised"]
        assert life.hello["watchdog_s"] is None
        assert stranger.fileno() not in open_fds(life.pid) or "null" not in open_fds(life.pid)[stranger.fileno()]


def test_the_keeper_has_a_session_of_its_own(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    assert life.hello["session"] == life.pid
    assert life.hello["parent"] == supervisor.pid


def test_removing_closes_every_descriptor_of_that_name(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    before = open_fds(supervisor.pid)
    for name, text in (("a", "1"), ("b", "2"), ("a", "3"), ("c", "4")):
        life.ask("store", name=name, text=text)
    assert life.ask("kept") == ["a", "b", "a", "c"]
    life.ask("remove", name="a")
    life.ask("remove", name="unknown")
    assert life.ask("kept") == ["b", "c"]
    assert len(open_fds(supervisor.pid)) == len(before) + 2
    again = kill_and_wait(life, supervisor)
    assert [(each["name"], each["text"]) for each in again.handed] == [("b", "2"), ("c", "4")]


def test_a_descriptor_that_is_kept_already_is_not_kept_twice(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    store(life, a="text")
    life = kill_and_wait(life, supervisor)
    life.ask("store_again", name="other", position=0)
    store(life, b="text")  # the same bytes in another file
    assert life.ask("kept") == ["a", "b"]


def test_the_answer_what_is_kept_may_be_larger_than_a_pipe(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    assert life.ask("kept") == []
    names = [f"{number:03}".ljust(255, "x") for number in range(300)]
    for name in names:
        life.ask("store", name=name, text=name)
    assert life.ask("kept") == names


def test_a_barrier_ends_after_all_that_was_said_before_it(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    before = open_fds(supervisor.pid)
    for number in range(40):  # several queues full
        life.ask("store", name=f"s{number}", text=str(number))
    life.ask("barrier")
    assert len(open_fds(supervisor.pid)) == len(before) + 40


def test_what_was_under_way_when_the_keeper_was_killed_is_kept(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    store(life, earlier="text")
    life.ask("barrier")
    supervisor.signal(signal.SIGSTOP)  # whatever is sent now stays on its way
    texts = {f"s{number}": f"in flight {number}" for number in range(8)}
    with OwnedFds([os.pidfd_open(life.pid)]) as process:
        life.tell("store_and_die", texts=texts)
        select.select([process[0]], [], [], TIMEOUT_S)  # now it is dead, and the supervisor finds both at once
    supervisor.signal(signal.SIGCONT)
    again = supervisor.next_life()
    assert {each["name"]: each["text"] for each in again.handed} == {"earlier": "text", **texts}


def test_over_the_limit_a_descriptor_is_dropped_loudly() -> None:
    with supervised("--store-max", "2", "--backoff-max", "0") as supervisor:
        life = supervisor.next_life()
        before = open_fds(supervisor.pid)
        store(life, a="1", b="2", c="3")
        assert life.ask("kept") == ["a", "b"]
        assert len(open_fds(supervisor.pid)) == len(before) + 2
        assert supervisor.wait_logged("dropped a descriptor: raise --store-max", fd_name="c")["level"] == "ERROR"
        life.ask("remove", name="a")
        store(life, c="3")
        assert kill_and_wait(life, supervisor).names == ["b", "c"]


def test_a_hundred_kills_leak_nothing() -> None:
    with supervised("--backoff-max", "0", child=("-S", BRIEF_CHILD)) as supervisor:
        lives = [supervisor.next_life()]
        before: dict[int, str] = {}
        for number in range(102):
            lives[-1].tell("go on")
            lives.append(supervisor.next_life())
            if number == 1:
                before, small = open_fds(supervisor.pid), anonymous_nbytes(supervisor.pid)
        assert len(open_fds(supervisor.pid)) == len(before)
        assert anonymous_nbytes(supervisor.pid) < small + MIB
    for earlier, life in itertools.pairwise(lives):
        assert life.hello["listen_pid"] == str(life.pid)
        assert [each["text"] for each in life.handed if each["name"] == "kept"] == list("01234")
        assert [each["text"] for each in life.handed if each["name"] == "new"] == [str(earlier.pid)]
        assert len(life.hello["open_fds"]) == 3 + 6 + 1  # and the one that the list needs


# Refusing


def test_datagrams_of_others_are_refused(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    before = open_fds(supervisor.pid)
    fd = sealed("planted")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.connect(life.hello["environment"]["NOTIFY_SOCKET"])
            socket.send_fds(stranger, [b"FDSTORE=1\nFDNAME=state"], [fd])
            for words in (b"READY=1", b"FDSTOREREMOVE=1\nFDNAME=a", b"WATCHDOG=trigger"):
                stranger.send(words)
    finally:
        os.close(fd)
    assert supervisor.wait_logged("refused a datagram", reason="not from the keeper")["sender_pid"] == os.getpid()
    store(life, a="mine")
    assert life.ask("kept") == ["a"]
    assert len(open_fds(supervisor.pid)) == len(before) + 1
    assert kill_and_wait(life, supervisor).names == ["a"]


BAD = [
    ("", 1),
    ("FDSTORE=2\nFDNAME=x", 1),
    ("FDSTORE=1\nFDNAME=x", 0),
    ("FDSTORE=1\nFDSTOREREMOVE=1\nFDNAME=x", 1),
    ("FDSTORE=1\nFDNAME=x\nFDNAME=y", 1),
    ("FDSTOREREMOVE=1", 0),
    ("FDSTOREREMOVE=1\nFDNAME=a", 1),
    ("BARRIER=1", 2),
    ("BARRIER=1\nFDSTORE=1\nFDNAME=x", 1),
    ("READY=1", 1),
    ("X_WEIGHTCACHED_KEPT=1", 3),
    ("FDSTORE=1\nFDNAME=x\0", 1),
    ("FDSTORE=1\nFDNAME=x\n" + "A=" + 5000 * "x", 1),
]
"""A datagram's words, and how many descriptors come with them."""


def test_a_bad_datagram_changes_nothing_and_leaves_no_descriptor(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    store(life, a="text")
    life.ask("barrier")
    before = open_fds(supervisor.pid)
    for words, pipes in BAD:
        assert life.ask("send", data=words, pipes=pipes) == pipes * [True], words
        assert life.ask("kept") == ["a"], words
        assert open_fds(supervisor.pid) == before, words
    assert supervisor.wait_logged("refused a datagram")["sender_pid"] == life.pid
    assert kill_and_wait(life, supervisor).names == ["a"]


def test_several_descriptors_in_one_datagram_are_kept_under_its_name(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    assert life.ask("send", data="FDNAME=x\nSOMETHING=new\nFDSTORE=1", pipes=3) == [False] * 3
    assert life.ask("send", data="FDSTORE=1\nFDNAME=a:b", pipes=1) == [False]
    assert life.ask("kept") == ["x", "x", "x", "stored"]


def test_a_descriptor_for_which_there_is_no_room_is_refused_not_half_kept(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    store(life, a="text")
    life.ask("barrier")
    before = open_fds(supervisor.pid)
    limits = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (max(before) + 2, limits[1]))
    try:
        assert life.ask("send", data="FDSTORE=1\nFDNAME=x", pipes=3) == [True] * 3
    finally:
        resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, limits)
    supervisor.wait_logged("refused a datagram", reason="too large, or no room here for its descriptors")
    assert life.ask("kept") == ["a"]
    store(life, b="text")
    assert life.ask("kept") == ["a", "b"]
    assert len(open_fds(supervisor.pid)) == len(before) + 1


# Ending and starting again


def test_a_keeper_that_ends_well_ends_the_supervisor() -> None:
    with supervised() as supervisor:
        life = supervisor.next_life()
        store(life, a="text")
        folder = Path(life.hello["environment"]["NOTIFY_SOCKET"]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        life.tell("exit", status=0)
        assert supervisor.wait() == 0
        assert not folder.exists()
        assert len(supervisor.logged("keeper started")) == 1


def test_pauses_grow_while_lives_are_short() -> None:
    with supervised() as supervisor:
        deaths_s, births_s = [], []
        for number in range(4):
            life = supervisor.next_life()
            births_s.append(time.monotonic())
            if number % 2:
                life.tell("exit", status=1)
            else:
                life.kill()
            life.wait_dead()
            deaths_s.append(time.monotonic())
        pauses_s = [birth_s - death_s for death_s, birth_s in zip(deaths_s, births_s[1:], strict=False)]
        assert [record["after_s"] for record in supervisor.logged("keeper died: starting it again")][:3] == [
            0,
            0.1,
            0.2,
        ]
        assert pauses_s[1] >= 0.1
        assert pauses_s[2] >= 0.2


def test_pauses_follow_from_how_long_each_life_was() -> None:
    with supervised("--backoff-max", "0.2", "--backoff-reset", "0.5") as supervisor:
        for seconds in (0.0, 0.0, 0.0, 0.5, 0.0, 0.0):  # what passes here is the life itself
            supervisor.next_life().tell("exit_after", status=1, seconds=seconds)
        supervisor.next_life()
        died = supervisor.logged("keeper died: starting it again")
        backoff = BackOff(max_s=0.2, reset_s=0.5)
        assert [record["after_s"] for record in died] == [backoff.pause_after(record["lived_s"]) for record in died]
        assert died[3]["after_s"] == 0.0


def test_options_that_cannot_be_used_end_it_but_never_cost_what_is_kept() -> None:
    with supervised("--backoff-max", "0") as supervisor:
        life = supervisor.next_life()
        store(life, a="text")
        life.tell("exit", status=64)
        life = supervisor.next_life()
        assert life.names == ["a"]
        life.ask("remove", name="a")
        life.ask("barrier")
        life.tell("exit", status=64)
        assert supervisor.wait() == 64


def test_a_program_that_cannot_be_run() -> None:
    with supervised(program=["/no/such/program"]) as supervisor:
        assert supervisor.wait() == 127
        assert supervisor.logged("the keeper cannot be started")[0]["program"] == "/no/such/program"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_is_forwarded_and_the_keepers_status_is_ours(number: signal.Signals) -> None:
    with supervised() as supervisor:
        life = supervisor.next_life()
        supervisor.signal(number)
        assert life.next_line() == {"signal": number.name}
        life.tell("exit", status=7)
        assert supervisor.wait() == 7


def test_a_second_stop_signal_is_forwarded_and_then_the_keeper_is_killed() -> None:
    with supervised("--stop-timeout", "0.2") as supervisor:
        life = supervisor.next_life()
        supervisor.signal(signal.SIGTERM)
        assert life.next_line() == {"signal": "SIGTERM"}
        time.sleep(0.4)  # nothing is to happen: after one signal the keeper takes its time
        assert life.ask("kept") == []
        supervisor.signal(signal.SIGTERM)
        told_s = time.monotonic()
        assert life.next_line() == {"signal": "SIGTERM"}
        life.wait_dead()
        assert time.monotonic() - told_s >= 0.2 - 0.05
        assert supervisor.wait() == 128 + signal.SIGKILL


def test_a_hangup_is_forwarded_and_stops_nothing(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    supervisor.signal(signal.SIGHUP)
    assert life.next_line() == {"signal": "SIGHUP"}
    assert kill_and_wait(life, supervisor).names == []


def test_told_to_stop_while_no_keeper_runs() -> None:
    with supervised() as supervisor:
        for _ in range(6):  # the pause after the last is over a second
            supervisor.next_life().tell("exit", status=1)
        supervisor.wait_logged("keeper died: starting it again", after_s=1.6)
        supervisor.signal(signal.SIGTERM)
        assert supervisor.wait() == 0
        assert len(supervisor.logged("keeper started")) == 6


def test_the_keeper_dies_with_the_supervisor(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    supervisor.signal(signal.SIGKILL)
    life.wait_dead()


# Watchdog, and the service manager above


def test_a_hung_keeper_is_killed_and_started_again() -> None:
    with supervised("--watchdog", "2", "--backoff-max", "0") as supervisor:
        life = supervisor.next_life()
        assert life.hello["watchdog_s"] == 2.0
        store(life, a="text")
        life.ask("live")
        life.ask("barrier")
        life.kill(signal.SIGSTOP)
        stopped_s = time.monotonic()
        life.wait_dead()
        assert 1.0 <= time.monotonic() - stopped_s <= 2.0 + 5.0
        assert supervisor.next_life().names == ["a"]
        assert supervisor.logged("killing the keeper")[0]["reason"] == "no sign of life for 2 s"


def test_who_never_said_ready_or_is_stopping_is_not_watched() -> None:
    with supervised("--watchdog", "0.2") as supervisor:
        life = supervisor.next_life()
        life.ask("stopping", status="draining")
        life.ask("ready", status="late")
        # Nothing is to happen; what is waited for is the time in which it would have.
        life.ask("barrier")
        supervisor.signal(signal.SIGHUP)
        time.sleep(0.5)
        assert life.next_line() == {"signal": "SIGHUP"}
        assert life.ask("kept") == []


def test_a_keeper_that_says_it_hangs_is_killed(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    life.tell("send", data="WATCHDOG=trigger")
    supervisor.wait_logged("killing the keeper", reason="it reports that it hangs")
    supervisor.next_life()


def test_what_the_keeper_says_is_passed_on_upwards(runtime_dir: Path) -> None:
    runtime_dir.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(runtime_dir / "manager"))
        manager.settimeout(TIMEOUT_S)
        with supervised(environment={"NOTIFY_SOCKET": str(runtime_dir / "manager")}) as supervisor:
            life = supervisor.next_life()
            assert life.hello["environment"]["NOTIFY_SOCKET"] != str(runtime_dir / "manager")
            life.ask("ready", status="serving\x07")
            assert manager.recv(4096) == b"READY=1\nSTATUS=serving\\x07"
            life.ask("status", text="busy")
            assert manager.recv(4096) == b"STATUS=busy"
            life.ask("send", data="ERRNO=5")
            assert manager.recv(4096) == b"ERRNO=5"
            store(life, a="text")
            life.kill()
            assert manager.recv(4096).startswith(b"STATUS=the keeper died (killed by SIGKILL)")
            life = supervisor.next_life()
            supervisor.signal(signal.SIGTERM)
            assert manager.recv(4096) == b"STOPPING=1"
            life.tell("exit", status=0)
            assert supervisor.wait() == 0


def test_a_manager_that_does_not_read_is_told_the_last_of_each_later(runtime_dir: Path) -> None:
    runtime_dir.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(runtime_dir / "manager"))
        manager.settimeout(TIMEOUT_S)
        with supervised(environment={"NOTIFY_SOCKET": str(runtime_dir / "manager")}) as supervisor:
            life = supervisor.next_life()
            for number in range(600):  # more than its queue holds
                life.ask("status", text=str(number))
                if number % 8 == 0:
                    life.ask("barrier")
            life.ask("ready", status="at last")
            life.ask("barrier")
            said: list[bytes] = []
            while not said or b"READY=1" not in said[-1]:
                said.append(manager.recv(4096))
            assert len(said) < 600
            assert sorted(said[-1].split(b"\n")) == [b"READY=1", b"STATUS=at last"]


def test_a_manager_that_goes_away_costs_nothing(runtime_dir: Path) -> None:
    runtime_dir.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(runtime_dir / "manager"))
        with supervised(environment={"NOTIFY_SOCKET": str(runtime_dir / "manager")}) as supervisor:
            life = supervisor.next_life()
            manager.close()
            life.ask("ready", status="serving")
            store(life, a="text")
            assert supervisor.wait_logged("the service manager was not told")["unsaid"] == "READY STATUS"
            assert kill_and_wait(life, supervisor).names == ["a"]


def test_the_managers_watchdog_is_for_us_and_its_interval_for_the_keeper(runtime_dir: Path) -> None:
    runtime_dir.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(runtime_dir / "manager"))
        manager.settimeout(TIMEOUT_S)
        variables = {"NOTIFY_SOCKET": str(runtime_dir / "manager"), "WATCHDOG_USEC": "2000000"}
        with supervised("--backoff-max", "0", environment=variables) as supervisor:
            life = supervisor.next_life()
            assert life.hello["watchdog_s"] == 2.0
            life.ask("ready", status="serving")
            life.kill(signal.SIGSTOP)
            signs = 0
            while b"the keeper died" not in (said := manager.recv(4096)):
                signs += said == b"WATCHDOG=1"
            assert signs >= 2, "while the keeper hangs, the supervisor does not"
            supervisor.next_life()


# As a process


@pytest.mark.root
def test_it_works_as_process_1() -> None:
    prefix = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with supervised("--backoff-max", "0", prefix=prefix) as supervisor:
        life = supervisor.next_life()
        assert life.hello["parent"] == 1
        store(life, a="text")
        assert life.ask("orphan"), "an orphan was not reaped"
        life.tell("store_and_die", texts={"b": "in flight"})
        life.wait_dead()
        life = supervisor.next_life()
        assert life.names == ["a", "b"]
        assert life.hello["environment"]["LISTEN_PID"] == str(life.pid)
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
        assert len(children) == 1
        os.kill(int(children[0]), signal.SIGTERM)
        assert life.next_line() == {"signal": "SIGTERM"}
        life.tell("exit", status=5)
        assert supervisor.wait() == 5


def test_it_is_small_and_has_one_thread(supervisor: Supervised) -> None:
    life = supervisor.next_life()
    store(life, **{f"s{number}": 1000 * str(number) for number in range(100)})
    life.ask("barrier")
    assert anonymous_nbytes(supervisor.pid) < 12 * MIB
    assert len(os.listdir(f"/proc/{supervisor.pid}/task")) == 1


def test_it_imports_nothing_heavy() -> None:
    program = "import sys, weightcached.daemon.supervise\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"asyncio", "numpy", "pydantic", "subprocess", "tempfile", "torch", "uvloop"} & set(loaded)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve"],
        ["--"],
        ["--no-such-option", "--", "serve"],
        ["--watchdog", "0", "--", "serve"],
        ["--watchdog", "nan", "--", "serve"],
        ["--stop-timeout", "-1", "--", "serve"],
        ["--store-max", "0", "--", "serve"],
        ["extra", "--", "serve"],
    ],
)
def test_options_that_cannot_be_used(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    from weightcached.daemon.supervise import main

    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 64
    assert "weightcached supervise: " in capfd.readouterr().err


def test_what_killed_supervisors_left_is_removed(runtime_dir: Path) -> None:
    runtime_dir.mkdir()
    environment = {"TMPDIR": str(runtime_dir)}
    with supervised(environment=environment) as killed, supervised(environment=environment) as living:
        killed.next_life()
        life = living.next_life()
        killed.signal(signal.SIGKILL)
        killed.process.wait(TIMEOUT_S)
        assert len(list(runtime_dir.iterdir())) == 2
        (runtime_dir / "weightcached-supervisor-file").touch()
        (runtime_dir / "weightcached-supervisor-new").mkdir(mode=0o700)
        with supervised(environment=environment) as third:
            notify = Path(third.next_life().hello["environment"]["NOTIFY_SOCKET"]).parent
            assert {path.name for path in runtime_dir.iterdir()} == {
                "weightcached-supervisor-file",
                "weightcached-supervisor-new",
                notify.name,
                Path(life.hello["environment"]["NOTIFY_SOCKET"]).parent.name,
            }
            store(life, a="the living is not disturbed")
            assert life.ask("kept") == ["a"]


def test_a_folder_that_cannot_be_used(runtime_dir: Path) -> None:
    with supervised(environment={"TMPDIR": str(runtime_dir / "missing")}) as supervisor:
        assert supervisor.wait() == 1
        assert "TMPDIR" in "\n".join(supervisor.log.lines)
