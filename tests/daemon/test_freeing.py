"""What is given back, and when: by count, by the last lease, by command, after the grace, and for room. And that after
many changes nothing is left of them."""

import gc
import os
import re
import signal
from collections import Counter
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from tests.support.cgroups import memory_limit
from tests.support.checkpoints import settled
from tests.support.commanding import Changer, from_directory, other_weights, standings
from tests.support.daemons import TIMEOUT_S, scripted_daemon, supervised_daemon
from tests.support.eventually import eventually
from tests.support.manager import Manager
from tests.support.resources import anonymous_nbytes, holding
from weightcached.client import attach
from weightcached.protocol.control import Drop, FromCheckpoint, FromHeld, Pin, RankState
from weightcached.protocol.errors import GenerationGone, UpdateConflict
from weightcached.protocol.memory import host

MIB = 1 << 20


def several(model: Path, to: Path, count: int) -> list[Path]:
    return [other_weights(model, to / str(number), number=number) for number in range(1, count + 1)]


def test_as_many_are_kept_as_the_options_or_the_change_say(model: Path, runtime_dir: Path, tmp_path: Path) -> None:
    directories = several(model, tmp_path, 4)
    with scripted_daemon(model, runtime_dir, "--keep-generations", "2") as served:
        first = served.wait_until("ready").generation
        changer = Changer(served)
        made = [first, *(changer.update(from_directory(directory)).current for directory in directories[:3])]
        served.wait_logged("generation dropped", generation=first)
        assert [id_ for id_, _ in standings(changer.state())] == made[:0:-1]
        last = changer.update(from_directory(directories[3]), keep_previous=0).current
        for dropped in made[1:]:
            served.wait_logged("generation dropped", generation=dropped)
        assert standings(changer.state()) == [(last, "current")]


def test_a_pinned_version_that_is_loaded_again_is_held_once_and_pinned_still(
    model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    """However often; and after the keeper was killed."""
    (other,) = several(model, tmp_path, 1)
    with supervised_daemon(model, runtime_dir, script={}) as served:
        served.wait_until("ready")
        changer = Changer(served)
        for _ in range(20):
            pinned = str(changer.update(from_directory(other)).current)
            changer.ask(Pin(generation=pinned, pinned=True), RankState)
            between = str(changer.update(from_directory(model)).current)
        last = str(changer.update(from_directory(other)).current)
        served.wait_logged("generation dropped", generation=pinned)
        killed = len(served.log.lines)
        served.kill_keeper()
        served.wait_ready_again(killed)
        held = changer.state().generations
        assert [(one.generation, one.pinned) for one in held] == [(last, True), (between, True)], held
        assert [one.pinned_for_s is None for one in held] == [True, False], "one of them for the grace alone"


def test_pinned_and_leased_ones_stay_until_they_are_not(model: Path, runtime_dir: Path, tmp_path: Path) -> None:
    one, two = several(model, tmp_path, 2)
    with scripted_daemon(model, runtime_dir, "--keep-generations", "0") as served:
        first = str(served.wait_until("ready").generation)
        changer = Changer(served)
        assert changer.ask(Pin(generation=first, pinned=True), RankState).generations[0].pinned
        second = str(changer.update(from_directory(one)).current)
        lease = served.connect()
        _, fds = served.attach(lease, want="current")
        fds.close()
        third = changer.update(from_directory(two)).current
        assert [id_ for id_, _ in standings(changer.state())] == [third, second, first]
        for needed in (first, second):
            with pytest.raises(UpdateConflict):
                changer.ask(Drop(generation=needed), RankState)
        with pytest.raises(UpdateConflict):
            changer.ask(Drop(generation=str(third), force=True), RankState)  # never what is served
        with pytest.raises(GenerationGone):
            changer.ask(Pin(generation="0" * 32, pinned=True), RankState)
        lease.close()
        served.wait_logged("generation dropped", generation=second)
        changer.ask(Drop(generation=first, force=True), RankState)
        assert changer.ask(Drop(generation=first), RankState).current == third  # again: it is done
        assert standings(changer.state()) == [(third, "current")]


def test_after_a_restart_engines_get_time_and_pins_are_remembered(
    model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    one, two = several(model, tmp_path, 2)
    with Manager(runtime_dir.parent) as manager:
        daemon = manager.start(model, runtime_dir, "--keep-generations", "2")
        first = str(daemon.wait_until("ready").generation)
        changer = Changer(daemon)
        second = changer.update(from_directory(one)).current
        third = changer.update(from_directory(two)).current
        changer.ask(Pin(generation=first, pinned=True), RankState)
        daemon.stop(signal.SIGKILL)
        again = manager.start(model, runtime_dir, "--keep-generations", "0", "--adoption-grace", "2")
        again.wait_until("ready")
        held = Changer(again).state().generations
        assert [one.generation for one in held] == [third, second, first]
        assert [one.pinned for one in held] == [False, True, True]
        again.wait_logged("generation dropped", generation=second)
        held = Changer(again).state().generations
        assert [(one.generation, one.pinned_for_s) for one in held] == [(third, None), (first, None)]
        again.stop(signal.SIGKILL)


@pytest.mark.root
def test_room_is_made_of_what_is_kept_for_rollback_and_else_refused_with_the_numbers(
    model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    one, two, three = several(model, tmp_path, 3)
    script = {"segment_nbytes": 120 * MIB}
    with (
        memory_limit(450 * MIB) as group,
        scripted_daemon(model, runtime_dir, script=script, group=group) as served,
    ):
        first = served.wait_until("ready").generation
        changer = Changer(served)
        second = changer.update(from_directory(one)).current
        lease = served.connect()
        _, fds = served.attach(lease, want="current")  # holds the second
        fds.close()
        third = changer.update(from_directory(two)).current
        served.wait_logged("generation dropped", generation=first)
        assert [id_ for id_, _ in standings(changer.state())] == [third, second]
        _, failed = changer.prepare(from_directory(three))
        lease.close()
        assert failed.change is not None
        assert (failed.state, failed.change.error_code) == ("ready", "insufficient_memory")
        assert "2 generations of 240 MiB" in str(failed.change.error)
        assert "bytes free of" in str(failed.change.error)


@pytest.mark.root
def test_what_an_engine_still_maps_is_measured_though_no_lease_says_so(
    model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    """The book is empty and the generation freed; its pages are not, and the next one would have no room."""
    one, two = several(model, tmp_path, 2)
    script = {"segment_nbytes": 120 * MIB}
    with (
        memory_limit(450 * MIB) as group,
        scripted_daemon(model, runtime_dir, "--keep-generations", "0", script=script, group=group) as served,
    ):
        first = served.wait_until("ready").generation
        changer = Changer(served)
        lease = served.connect()
        _, fds = served.attach(lease)
        with fds, closing(host.map_readonly(fds[1], nbytes=120 * MIB)) as mapping:
            fds.close()
            second = changer.update(from_directory(one)).current
            lease.close()
            served.wait_logged("generation dropped", generation=first)
            transaction, refused = changer.prepare(from_directory(two))
            assert standings(refused) == [(second, "current")], "the book has one of 120 MiB"
            assert refused.change is not None
            assert (refused.state, refused.change.error_code) == ("ready", "insufficient_memory")
            why = str(refused.change.error)
            numbers = re.search(r"(\d+) bytes free \((\d+) for the shard.*?(\d+) bytes free of", why)
            assert numbers is not None, why
            needed, shard, free = map(int, numbers.groups())
            assert shard == 120 * MIB
            assert free < needed < free + 120 * MIB, "what nobody lists is what it lacks"
            assert "beside 1 generation of 120 MiB" in why
            changer.decide(transaction, commit=False)
            assert bytes(mapping.view()[:1]) == b"\1", "the engine has it still"
        third = changer.update(from_directory(two)).current
        assert third not in (first, second)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_1000_changes_that_an_engine_follows_leave_nothing_behind(
    model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    """One in fifty is loaded from disk by a real worker, the others go back and forth between the two that are held;
    the engine swaps at each. What keeper, supervisor and engine hold is what they held.
    """
    other = settled(*several(model, tmp_path, 1))  # the digest of younger files is not remembered for the next load
    with supervised_daemon(model, runtime_dir) as served, ExitStack() as stack:
        served.wait_until("ready")
        weights = stack.enter_context(attach(model, mode="require", runtime_dir=runtime_dir, want="current"))
        changer, following, last = Changer(served), weights.follow(), weights["lm_head.weight"][-1]
        processes = {"keeper": served.report().pid, "supervisor": served.pid, "engine": os.getpid()}
        seen: set[str] = set()

        def change(source: FromCheckpoint | FromHeld) -> None:
            changer.update(source)
            while (found := following.pending()) is None:
                assert following.wait(TIMEOUT_S)
            with weights.stage(generation=found.generation) as staged, weights.barrier.stopped() as stopped:
                staged.swap(stopped)
            weights.verify()
            seen.add(str(last.tolist()))

        def fifty_changes() -> None:
            change(from_directory(other))
            for _ in range(49):  # an odd number: what is loaded next is not what is served
                change(FromHeld(version=changer.state().generations[1].version))

        def held() -> dict[str, object]:
            gc.collect()
            return {
                **{who: holding(pid) for who, pid in processes.items()},
                "generations and leases": Counter((one.standing, one.leases) for one in changer.state().generations),
            }

        change(from_directory(other))
        eventually(lambda: served.report().digest is not None)  # known, it is in the manifests of what is loaded next
        change(FromHeld(version=changer.state().generations[1].version))
        fifty_changes()
        before, memory = held(), {who: anonymous_nbytes(pid) for who, pid in processes.items()}
        assert before["generations and leases"] == {("current", 1): 1, ("previous", 0): 1}
        for _ in range(20):
            fifty_changes()
        with suppress(AssertionError):  # a command's last connection may be about to go
            eventually(lambda: held() == before)
        assert held() == before
        for who, pid in processes.items():
            more = 8 * MIB if who == "engine" else 4 * MIB  # the test is the engine, and keeps the others' log
            assert anonymous_nbytes(pid) < memory[who] + more, who
        assert anonymous_nbytes(processes["keeper"]) < 64 * MIB
        assert len(seen) == 2, "the engine computes with the one, and with the other"
        report = served.report()
        assert (report.pid, report.vault) == (processes["keeper"], "kept")
