"""Somebody is killed after each step of a change over two real ranks: then all serve the new weights, or none does.

The steps are said one by one (`support/groups.py`), so that "after each step" is exact. Between two of them nobody
waits for time: a worker that has to be in the middle of a load says so by opening a pipe. A coordinator that is killed
is one that says nothing more.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil
import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.commanding import Changer, from_directory, other_weights
from tests.support.daemons import REAL, TIMEOUT_S, Daemon, supervised_daemon
from tests.support.groups import Change, group, kill_and_wait, versions, waiting
from tests.support.unprivileged import ROOT
from weightcached.client.control import commands, held_commands, resolve, rollback, update
from weightcached.protocol.control import Decided, FromCheckpoint, FromHeld, ReadDecision
from weightcached.protocol.errors import RanksDisagree

STEPS = ("looked", "opened", "one prepared", "preparing", "prepared", "committed", "told")
DECIDED = {"looked": "old", "opened": "old", "one prepared": "old", "preparing": "old", "prepared": "either"}
"""After which steps the change cannot, or can, have come about when somebody ends it; from the commit on it has."""
VICTIMS = ("the coordinator", "keeper 0", "keeper 1")

_NUMBERS = count(2)


class Two:
    """Two ranks; from the second load on, rank 1's worker waits for a byte in ``pipe``."""

    def __init__(self, ranks: list[Daemon], model: Path, pipe: Path, folder: Path) -> None:
        self.ranks = ranks
        self.model = model
        self.pipe = pipe
        self._folder = folder

    def newer(self) -> Path:
        number = next(_NUMBERS)
        return other_weights(self.model, self._folder / str(number), number=number)

    def in_the_middle(self) -> int:
        """The worker of rank 1, in the middle of its load; it waits at the pipe."""
        keeper = psutil.Process(self.ranks[1].report().pid)
        self._writer = os.open(self.pipe, os.O_WRONLY)  # returns when it has opened its end
        return next(child.pid for child in keeper.children() if "scripted_worker" in " ".join(child.cmdline()))

    def let_go(self) -> None:
        os.write(self._writer, b"1")
        os.close(self._writer)

    def leave(self) -> None:
        """Whoever waited is gone."""
        os.close(self._writer)

    def reach(self, change: Change, step: str) -> None:
        """Do what a coordinator does, up to and with ``step``."""
        if step == "looked":
            return
        change.open()
        if step == "opened":
            return
        change.prepare(0)
        change.prepared(0)
        if step == "one prepared":
            return
        change.prepare(1)
        if isinstance(change.source, FromCheckpoint):
            self.in_the_middle()
            if step == "preparing":
                return
            self.let_go()
        change.prepared(1)
        if step == "prepared":
            return
        assert change.commit().outcome == "committed"
        if step == "told":
            change.resolve()


@contextmanager
def two_ranks(folder: Path) -> Iterator[Two]:
    """Ready; ``folder`` is for what is theirs."""
    model, pipe, attempts = tiny_llama(folder / "model"), folder / "pipe", folder / "attempts"
    os.mkfifo(pipe)
    attempts.touch()
    script = {"hang_at": "memory", "release": str(pipe), "spoil_from_attempt": 2, "attempts": str(attempts)}
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name,
        group(model, Path(name) / "run", scripts={1: script}) as ranks,
    ):
        yield Two(ranks, model, pipe, folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with two_ranks(tmp_path_factory.mktemp("two")) as two:
        yield two


def outcome(two: Two, first: list[str]) -> str:
    """What became of a change that is over: ``old`` or ``new``, on both."""
    assert waiting(two.ranks) == []
    now = versions(two.ranks)
    assert len(set(now)) == 1, now
    return "old" if now == first else "new"


def held_by_all(two: Two) -> set[str]:
    return {one.generation for rank in two.ranks for one in Changer(rank).state().generations}


def ended_by_the_next(two: Two, change: Change, step: str, victim: str) -> str:
    """The outcome of a change that is left after ``step``, where ``victim`` dies: the only one that it may have."""
    first = versions(two.ranks)
    two.reach(change, step)
    if victim != "the coordinator":
        kill_and_wait(two.ranks[int(victim[-1])])
    resolve(runtime_dir=two.ranks[0].place.runtime_dir, timeout_s=TIMEOUT_S)
    if step == "preparing":
        two.leave()
    found = outcome(two, first)
    assert found == {"old": "old", "either": "new"}.get(DECIDED.get(step, ""), "new")
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("step", STEPS)
def test_killed_after_a_step_and_ended_by_the_next_coordinator(two: Two, step: str, victim: str) -> None:
    before = held_by_all(two)
    if ended_by_the_next(two, Change(two.ranks, from_directory(two.newer())), step, victim) == "old":
        assert held_by_all(two) <= before, "what was given up is dropped"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("step", [step for step in STEPS if step != "preparing"])  # nothing is loaded
def test_a_rollback_that_is_left_at_a_step(two: Two, step: str, victim: str) -> None:
    """As an update; and whatever becomes of it, all that was held still is."""
    back_to = versions(two.ranks)[0]
    two.reach(Change(two.ranks, from_directory(two.newer())), "told")
    before = held_by_all(two)
    ended_by_the_next(two, Change(two.ranks, FromHeld(version=back_to)), step, victim)
    assert held_by_all(two) == before


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["keeper 0", "keeper 1"])
def test_a_decision_that_is_written_is_read_by_the_rank_itself(two: Two, victim: str) -> None:
    first = versions(two.ranks)
    change = Change(two.ranks, from_directory(two.newer()))
    two.reach(change, "prepared")
    made = [info.generation for one in change.ranks if (info := one.state().change) is not None]
    seen = len(two.ranks[1].log.lines)
    assert change.commit().outcome == "committed"
    kill_and_wait(two.ranks[int(victim[-1])])
    # Before or after its death, whichever came first; nobody tells it.
    two.ranks[1].wait_logged("change", transaction=change.transaction, change="committed", first=seen)
    assert change.ranks[0].ask(ReadDecision(transaction=change.transaction), Decided).outcome == "committed"
    assert [one.current() for one in change.ranks] == made
    assert outcome(two, first) == "new"


@pytest.mark.timeout(300)
def test_a_worker_killed_in_the_middle_fails_the_change_and_nothing_else(two: Two) -> None:
    first = versions(two.ranks)
    change = Change(two.ranks, from_directory(two.newer()))
    change.open()
    change.prepare()
    change.prepared(0)
    os.kill(two.in_the_middle(), signal.SIGKILL)
    two.leave()
    state = change.ranks[1].ended(change.transaction)
    assert state.change is not None
    assert (state.change.state, state.change.error_code) == ("failed", "worker_died")
    assert change.abort().outcome == "aborted"
    change.resolve()
    assert outcome(two, first) == "old"


@pytest.mark.timeout(300)
def test_a_rank_that_cannot_reach_the_leader_serves_what_it_served(two: Two) -> None:
    """Rank 0's keeper is stopped, not dead: for as long as it likes, rank 1 decides nothing."""
    first = versions(two.ranks)
    change = Change(two.ranks, from_directory(two.newer()))
    two.reach(change, "prepared")
    leader = two.ranks[0].report().pid
    seen = len(two.ranks[1].log.lines)
    os.kill(leader, signal.SIGSTOP)
    try:
        two.ranks[1].wait_logged("the leader's decision is not known yet", first=seen)
        state = change.ranks[1].state()
        assert state.change is not None
        assert (state.change.state, state.current) == ("prepared", change.bases[1])
    finally:
        os.kill(leader, signal.SIGCONT)
    assert change.abort().outcome == "aborted"
    change.resolve()
    assert outcome(two, first) == "old"


@pytest.mark.timeout(300)
def test_the_command_gives_its_change_up_when_it_is_interrupted(two: Two) -> None:
    first = versions(two.ranks)
    at = two.ranks[0].place.runtime_dir
    command = [*REAL, "update", "--model", str(two.newer()), "--runtime-dir", str(at)]
    seen = len(two.ranks[1].log.lines)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    two.in_the_middle()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, "interrupted" in said) == (1, True), said
    assert Changer(two.ranks[0]).state().open is None
    two.ranks[1].wait_logged("change", change="aborted", first=seen)  # it has read so by itself
    two.leave()
    assert outcome(two, first) == "old"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", ["opening", "preparing", "committing", "telling"])
def test_the_command_is_killed_when_it_says_what_it_does(tmp_path: Path, line: str) -> None:
    model = tiny_llama(tmp_path / "model")
    other = other_weights(model, tmp_path / "other")
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name, group(model, Path(name) / "run") as ranks:
        at = ranks[0].place.runtime_dir
        first = versions(ranks)
        command = [*REAL, "update", "--model", str(other), "--runtime-dir", str(at)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        with process:
            said = next((text for text in process.stderr if line in text), None)
            process.kill()
        assert said is not None
        resolve(runtime_dir=at, timeout_s=TIMEOUT_S)
        assert waiting(ranks) == []
        assert len(set(versions(ranks))) == 1
        if line == "telling":
            assert versions(ranks) != first
            rollback(runtime_dir=at, timeout_s=TIMEOUT_S)
        else:
            update(other, runtime_dir=at, timeout_s=TIMEOUT_S)
        assert len(set(versions(ranks))) == 1


@pytest.mark.timeout(300)
def test_a_vault_that_is_lost_is_seen_and_the_ranks_are_made_one_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "model")
    other = other_weights(model, tmp_path / "other")
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name, group(model, Path(name) / "run") as ranks:
        at = ranks[0].place.runtime_dir
        update(other, runtime_dir=at, timeout_s=TIMEOUT_S)
        ranks[1].stop(signal.SIGKILL)  # the supervisor, and with it everything that rank 1 held
        where = ["--runtime-dir", str(at)]
        assert held_commands.generations_main(where) == held_commands.DIFFERENT_EXIT
        assert commands.update_main(["--resolve", *where]) == commands.AWAY_EXIT
        with supervised_daemon(model, at, script={}, layout="fused", tp_size=2, tp_rank=1) as again:
            again.wait_until("ready")
            both = [ranks[0], again]
            assert len(set(versions(both))) == 2
            with pytest.raises(RanksDisagree, match="--align"):
                update(other, runtime_dir=at, timeout_s=TIMEOUT_S)
            assert commands.update_main(["--model", str(other), "--align", *where]) == 0
            assert len(set(versions(both))) == 1
            said = capsys.readouterr().out
            assert re.search(
                r"(\S+) is served by every rank, instead of (?!\1)\S+ on tp1of2, \S.* on the others", said
            ), said
