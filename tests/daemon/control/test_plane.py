"""The control plane of real daemons: there when the data plane is, told everything, back after a restart, gone with the
place, and closed to other users.
"""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemons import TIMEOUT_S, Daemon, scripted_daemon, supervised_daemon
from tests.support.resources import anonymous_nbytes
from tests.support.unprivileged import NOBODY, ROOT, command_as, folder_for_everyone
from weightcached.client.control.listening import Heard, Listener, Lost, follow
from weightcached.protocol.control import ControlEvent, Describe, RankState
from weightcached.protocol.control_channel import ask, ask_blocking
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import DaemonAbsent
from weightcached.protocol.messages import Report, Status
from weightcached.protocol.places import Place, places_in


def described(place: Place) -> RankState:
    return ask_blocking(place, Describe(), RankState, deadline=Deadline.after(TIMEOUT_S), patience_s=TIMEOUT_S)


async def until(listener: Listener, kind: str) -> list[ControlEvent]:
    """Every event up to the first of this kind."""
    events: list[ControlEvent] = []
    while True:
        heard = await listener.hear(TIMEOUT_S)
        assert heard is not None, events
        assert heard.missed == 0
        events.append(heard.event)
        if heard.event.kind == kind:
            return events


def names_in(place: Place) -> set[str]:
    return {path.suffix for path in place.directory.iterdir()}


def test_a_daemon_describes_itself_and_says_on_both_planes_the_same(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        report = daemon.wait_until("ready")
        state = described(daemon.place)
        assert (state.state, state.current) == ("ready", report.generation)
        assert [one.standing for one in state.generations] == ["current"]
        assert state.rank.is_leader
        asked = ask_blocking(daemon.place, Status(), Report, deadline=Deadline.after(TIMEOUT_S))
        assert (asked.pid, asked.version) == (daemon.pid, report.version)


def test_commands_wait_for_a_daemon_that_has_only_just_started(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_logged("listening")
        assert described(daemon.place).rank.place == "default"


def test_everything_that_happens_is_told_in_order(model: Path, runtime_dir: Path) -> None:
    async def listen(daemon: Daemon) -> None:
        async with Listener(daemon.place) as listener:
            first = await listener.hear(TIMEOUT_S)
            assert first is not None
            assert first.event.kind == "snapshot"
            assert first.event.rank_state is not None
            assert first.event.rank_state.current == first.event.generation
            lease = daemon.connect()
            grant, fds = await asyncio.to_thread(daemon.attach, lease)
            fds.close()
            opened = (await until(listener, "lease_opened"))[-1]
            assert (opened.pid, opened.generation) == (os.getpid(), grant.generation)
            during = await ask(daemon.place, Describe(), RankState, deadline=Deadline.after(TIMEOUT_S))
            assert [one.leases for one in during.generations] == [1]
            lease.close()
            closed = (await until(listener, "lease_closed"))[-1]
            assert (closed.pid, closed.name) == (os.getpid(), "test")
            os.kill(daemon.pid, signal.SIGTERM)
            await until(listener, "draining")

    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        asyncio.run(listen(daemon))


def test_who_listens_while_weights_are_loaded_hears_of_progress_and_of_their_publication(
    model: Path, runtime_dir: Path
) -> None:
    async def listen(daemon: Daemon) -> list[ControlEvent]:
        following = follow(daemon.place)
        events: list[ControlEvent] = []
        async for one in following:
            if isinstance(one, Heard):
                events.append(one.event)
                if one.event.state == "ready":
                    await following.aclose()
                    break
        return events

    with scripted_daemon(model, runtime_dir, script={"seconds": 1.5}) as daemon:
        daemon.wait_logged("listening")
        events = asyncio.run(listen(daemon))
    assert events[0].kind == "snapshot"
    assert {one.kind for one in events} >= {"snapshot", "state"}
    assert events[-1].state == "ready"


def test_a_failed_load_is_told(model: Path, runtime_dir: Path, tmp_path: Path) -> None:
    async def listen(daemon: Daemon) -> ControlEvent:
        async with Listener(daemon.place) as listener:
            heard = await listener.hear(TIMEOUT_S)
            assert heard is not None
            return heard.event

    with scripted_daemon(tmp_path / "nothing", runtime_dir) as daemon:
        daemon.wait_logged("state", state="failed")
        daemon.wait_logged("control plane")
        event = asyncio.run(listen(daemon))
        assert (event.kind, event.state) == ("snapshot", "failed")
        assert described(daemon.place).generations == ()


def test_the_files_come_with_the_place_and_go_with_it(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_logged("control plane")
        place = daemon.place
        assert names_in(place) == {".sock", ".lock", ".ctl", ".evt"}
        for path in (place.control_path, place.events_path):
            assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
        assert places_in(runtime_dir) == [place]
        daemon.wait_until("ready")
    assert names_in(place) == {".lock"}
    with pytest.raises(DaemonAbsent):
        described(place)


def test_what_a_killed_daemon_left_is_no_place_and_is_replaced_or_released(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_logged("control plane")
        daemon.wait_until("ready")
        daemon.stop(signal.SIGKILL)
    place = daemon.place
    assert names_in(place) == {".sock", ".lock", ".ctl", ".evt"}
    with scripted_daemon(model, runtime_dir) as next_one:
        next_one.wait_logged("control plane")
        assert described(place).state in ("loading", "ready", "starting")
        next_one.stop(signal.SIGKILL)
    command = [sys.executable, "-m", "weightcached.daemon", "release", "--runtime-dir", str(runtime_dir)]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=TIMEOUT_S, capture_output=True).returncode == 0
    assert names_in(place) == {".lock"}


def test_a_second_daemon_takes_nothing_from_the_first(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as first:
        first.wait_until("ready")
        first.wait_logged("control plane")
        with scripted_daemon(model, runtime_dir) as second:
            second.process.wait(TIMEOUT_S)
            assert second.process.returncode == 1
            second.stop(signal.SIGKILL)
        asked = ask_blocking(first.place, Status(), Report, deadline=Deadline.after(TIMEOUT_S))
        assert asked.pid == first.pid


def test_a_keeper_that_dies_comes_back_with_its_plane_and_listeners_begin_anew(model: Path, runtime_dir: Path) -> None:
    async def listen(daemon: Daemon) -> None:
        following = follow(daemon.place)
        before = await anext(following)
        assert isinstance(before, Heard)
        pid = daemon.kill_keeper()
        assert isinstance(await anext(following), Lost)
        # Asked while it is dead.
        asked = Deadline.after(TIMEOUT_S)
        again = await ask(daemon.place, Status(), Report, deadline=asked, patience_s=TIMEOUT_S)
        assert again.pid != pid
        after = await anext(following)
        assert isinstance(after, Heard)
        assert after.event.kind == "snapshot"
        assert after.event.nonce != before.event.nonce
        assert after.event.generation == before.event.generation
        await following.aclose()

    with supervised_daemon(model, runtime_dir, script={}) as daemon:
        daemon.wait_until("ready")
        daemon.wait_logged("control plane")
        asyncio.run(listen(daemon))


def test_zeromq_is_imported_after_the_data_plane_listens(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_logged("control plane")
        lines = [json.loads(line)["message"] for line in daemon.log.lines if line.startswith("{")]
        assert lines.index("listening") < lines.index("control plane")
    probe = "import sys, weightcached.daemon.keeper; sys.exit('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False, timeout=TIMEOUT_S).returncode == 0


def test_the_keeper_stays_small_whatever_is_asked_and_told(model: Path, runtime_dir: Path) -> None:
    async def busy(daemon: Daemon) -> None:
        for _ in range(20):
            asked = [
                ask(daemon.place, Describe(), RankState, deadline=Deadline.after(TIMEOUT_S), patience_s=30)
                for _ in range(20)
            ]
            await asyncio.gather(*asked)
        listeners = [Listener(daemon.place) for _ in range(40)]
        for one in listeners:
            await one.__aenter__()
            await one.hear(TIMEOUT_S)
        for _ in range(50):
            channel = daemon.connect()
            _, fds = await asyncio.to_thread(daemon.attach, channel)
            fds.close()
            channel.close()
        for one in listeners:
            await one.__aexit__()

    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        daemon.wait_logged("control plane")
        asyncio.run(busy(daemon))
        assert anonymous_nbytes(daemon.pid) < 64 << 20


@pytest.mark.root
def test_other_users_may_neither_command_nor_listen_even_on_the_allow_list(model: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from weightcached.client.control.listening import Listener\n"
        "from weightcached.protocol.control import Describe, RankState\n"
        "from weightcached.protocol.control_channel import ask_blocking\n"
        "from weightcached.protocol.deadline import Deadline\n"
        "from weightcached.protocol.errors import WeightCacheError\n"
        "from weightcached.protocol.places import Place\n"
        "place = Place(Path(sys.argv[1]), 'default', 'host-tp0of1')\n"
        "try:\n"
        "    ask_blocking(place, Describe(), RankState, deadline=Deadline.after(20))\n"
        "except WeightCacheError as error:\n"
        "    print(error.code)\n"
        "async def listen():\n"
        "    async with Listener(place) as listener:\n"
        "        print(await listener.hear(20))\n"
        "try:\n"
        "    asyncio.run(listen())\n"
        "except WeightCacheError as error:\n"
        "    print(error.code)\n"
    )
    with folder_for_everyone() as folder, scripted_daemon(model, folder / "run", "--allow-uid", str(NOBODY)) as daemon:
        daemon.wait_logged("control plane")
        for mode in (0o600, 0o666):  # by the file's mode, and behind it by the peer's user
            for path in (daemon.place.control_path, daemon.place.events_path):
                path.chmod(mode)
            command = command_as(NOBODY, [sys.executable, "-c", program, str(folder / "run")])
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False
            )
            assert result.stdout.split() == ["untrusted_client", "untrusted_client"], result.stderr
