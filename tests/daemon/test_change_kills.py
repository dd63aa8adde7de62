"""The keeper is killed at each step of a change: the next one holds what the record says, and nothing else."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.checkpoints import settled
from tests.support.commanding import Changer, from_directory, new_transaction, other_weights, standings
from tests.support.daemons import Daemon
from tests.support.manager import Manager
from tests.support.resources import open_fds
from weightcached.protocol.control import Decided as Decision
from weightcached.protocol.control import FromHeld, RankState, ReadDecision, Resolve


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    return settled(other_weights(model, tmp_path / "other"))


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[Manager]:
    with Manager(runtime_dir.parent) as manager:
        yield manager


@pytest.fixture
def start(manager: Manager, model: Path, runtime_dir: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts the place's next keeper; in the end none is left."""
    with ExitStack() as ending:

        def start(*extra: str, script: dict | None = None, checkpoint: Path | None = None) -> Daemon:
            started = manager.start(checkpoint or model, runtime_dir, *extra, script=script)
            ending.callback(started.stop, signal.SIGKILL)
            return started

        yield start


def kept(manager: Manager) -> set[str]:
    """Generations of which anything is in the vault."""
    return {name[1:33] for name in manager.names if name.startswith("g")}


def held_memfds(daemon: Daemon) -> int:
    return sum("memfd:weightcached" in what for what in open_fds(daemon.pid).values())


@pytest.mark.parametrize("end", [".s0", ".m"])
def test_killed_while_the_new_generation_is_stored(
    manager: Manager, start: Callable[..., Daemon], other: Path, end: str
) -> None:
    """In part, or whole and not written down as prepared: it is removed, for nobody can ever decide upon it."""
    first = start()
    before = first.wait_until("ready")
    changer = Changer(first)
    changer.open(transaction := new_transaction())
    manager.kill_when_stored = lambda name: name.endswith(end)
    changer.begin(transaction, from_directory(other))
    assert first.process.wait(60) == -signal.SIGKILL
    manager.kill_when_stored = lambda name: False
    assert len(kept(manager)) == 2
    again = Changer(second := start())
    report = second.wait_until("ready")
    assert report.generation == before.generation
    state = again.state()
    assert standings(state) == [(before.generation, "current")]
    assert (state.open, state.change) == (transaction, None)
    assert kept(manager) == {before.generation}
    assert again.decide(transaction, commit=False).outcome == "aborted"
    newer = again.update(from_directory(other)).current
    assert kept(manager) == {before.generation, newer}


def test_killed_when_prepared_and_after_the_decision(
    manager: Manager, start: Callable[..., Daemon], model: Path, other: Path
) -> None:
    first = start()
    before = first.wait_until("ready")
    changer = Changer(first)
    vault_id = changer.state().vault_id
    transaction, prepared = changer.prepare(from_directory(other))
    assert prepared.change is not None
    first.stop(signal.SIGKILL)

    again = Changer(second := start())
    assert second.wait_until("ready").generation == before.generation
    state = again.state()
    assert (state.change, state.open, state.vault_id) == (prepared.change, transaction, vault_id)
    assert standings(state) == standings(prepared)
    decided = again.decide(transaction, commit=True)
    newer = again.current()
    second.stop(signal.SIGKILL)

    once_more = Changer(third := start())
    report = third.wait_until("ready")
    assert (report.generation, report.model, report.bytes_read) == (newer, str(other), 0)
    state = once_more.state()
    assert standings(state) == [(newer, "current"), (before.generation, "previous")]
    assert state.generations[1].pinned_for_s is not None
    assert once_more.ask(ReadDecision(transaction=transaction), Decision) == decided
    third.wait_logged("proven again", verdict="proven")
    back = once_more.update(FromHeld(version=str(before.version)))
    assert standings(back) == [(before.generation, "current"), (newer, "previous")]
    third.stop(signal.SIGKILL)

    last = Changer(fourth := start())
    fourth.wait_until("ready")
    assert standings(last.state()) == standings(back)
    assert held_memfds(fourth) == 5  # the state, and two of each generation
    assert len(manager.names) == 6  # and the listener
    fourth.stop(signal.SIGKILL)

    # The operator names other weights: what a change has brought is not what is asked for any more.
    elsewhere = start(checkpoint=other)
    assert elsewhere.wait_until("ready").generation == newer


def test_killed_after_an_abort_nothing_of_it_comes_back(
    manager: Manager, start: Callable[..., Daemon], other: Path
) -> None:
    first = start()
    before = first.wait_until("ready")
    changer = Changer(first)
    transaction, _ = changer.prepare(from_directory(other))
    assert changer.decide(transaction, commit=False).outcome == "aborted"
    assert kept(manager) == {before.generation}
    first.stop(signal.SIGKILL)
    again = Changer(second := start())
    second.wait_until("ready")
    assert standings(again.state()) == [(before.generation, "current")]
    assert again.ask(ReadDecision(transaction=transaction), Decision).outcome == "aborted"
    assert again.ask(Resolve(transaction=transaction), RankState).change is None


def test_what_was_prepared_and_comes_back_torn_is_given_up(
    manager: Manager, start: Callable[..., Daemon], other: Path
) -> None:
    first = start()
    before = first.wait_until("ready")
    changer = Changer(first)
    transaction, prepared = changer.prepare(from_directory(other))
    assert prepared.change is not None
    first.stop(signal.SIGKILL)
    manager.remove(f"g{prepared.change.generation}.s0")
    again = Changer(second := start())
    report = second.wait_until("ready")
    assert report.last_error is not None
    state = again.state()
    assert (standings(state), state.change) == ([(before.generation, "current")], None)
    assert kept(manager) == {before.generation}
    assert again.decide(transaction, commit=False).outcome == "aborted"
