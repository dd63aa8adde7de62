"""What a vault does not give back, or gives back spoiled: weights that were committed and are lost are never followed,
in silence, by the version before them or after them; and what one of several has lost costs no other."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.commanding import Changer, from_directory, other_weights, standings
from tests.support.daemons import TIMEOUT_S, Daemon, ask, converse
from tests.support.manager import Manager
from weightcached.protocol.control import FromHeld, RankState
from weightcached.protocol.messages import Refused, Release, Released


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    return other_weights(model, tmp_path / "other")


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[Manager]:
    with Manager(runtime_dir.parent) as manager:
        yield manager


@pytest.fixture
def start(manager: Manager, model: Path, runtime_dir: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts the place's next keeper; in the end none is left."""
    with ExitStack() as ending:

        def start(*extra: str, checkpoint: Path | None = None) -> Daemon:
            started = manager.start(checkpoint or model, runtime_dir, *extra)
            ending.callback(started.stop, signal.SIGKILL)
            return started

        yield start


def killed_after(start: Callable[..., Daemon], *changes: Callable[[Changer], RankState]) -> list[str]:
    """What was current after the first load, and after each of ``changes``; then the keeper is killed."""
    first = start("--keep-generations", "3")
    first.wait_until("ready")
    changer = Changer(first)
    made = [changer.current(), *(str(change(changer).current) for change in changes)]
    first.stop(signal.SIGKILL)
    return made


def refused_everybody(daemon: Daemon) -> str:
    """Why it serves nothing, also to whoever takes whatever is current."""
    report = daemon.wait_until("failed")
    assert report.generation is None
    channel = daemon.connect()
    try:
        answer = converse(channel, daemon.hello(want="current")).message
    finally:
        channel.close()
    assert isinstance(answer, Refused)
    assert answer.code == "daemon_failed"
    return str(report.last_error)


@pytest.mark.parametrize("ends", [(".s0", ".m"), (".s0",), (".m",)], ids=["all", "segment", "manifest"])
def test_a_committed_version_that_is_lost_is_not_followed_by_the_one_before_it(
    manager: Manager, start: Callable[..., Daemon], other: Path, ends: tuple[str, ...]
) -> None:
    older, newer = killed_after(start, lambda changer: changer.update(from_directory(other)))
    for end in ends:
        manager.remove(f"g{newer}{end}")
    for _ in range(2):  # and the keeper after that knows it, too
        daemon = start()
        reason = refused_everybody(daemon)
        assert reason.startswith("generation_gone:")
        assert f"generation {newer}, from {other}" in reason
        assert f"found: generation {older}" in reason
        daemon.stop(signal.SIGKILL)
    daemon = start(checkpoint=other)  # what the refusal says
    assert daemon.wait_until("ready").model == str(other)
    assert {name[1:33] for name in manager.names if name.startswith("g")} == {Changer(daemon).current()}


def test_a_rolled_back_version_that_is_lost_is_loaded_anew_and_not_followed_by_the_newer(
    manager: Manager, start: Callable[..., Daemon], model: Path, other: Path
) -> None:
    older, newer, back = killed_after(
        start,
        lambda changer: changer.update(from_directory(other)),
        lambda changer: changer.update(FromHeld(version=changer.state().generations[1].version)),
    )
    assert back == older
    manager.remove(f"g{older}.s0")
    daemon = start()
    report = daemon.wait_until("ready")
    assert report.model == str(model)
    assert report.bytes_read > 0
    assert [id_ for id_, _ in standings(Changer(daemon).state())] == [report.generation]
    assert report.generation not in (older, newer)


def test_one_of_three_that_is_damaged_costs_no_other(
    manager: Manager, start: Callable[..., Daemon], other: Path, tmp_path: Path
) -> None:
    third = other_weights(other, tmp_path / "third", number=2)
    one, two, three = killed_after(
        start,
        lambda changer: changer.update(from_directory(other)),
        lambda changer: changer.update(from_directory(third)),
    )
    manager.remove(f"g{two}.m")
    daemon = start("--keep-generations", "3")
    daemon.wait_until("ready")
    assert standings(Changer(daemon).state()) == [(three, "current"), (one, "previous")]


@pytest.mark.parametrize("decided", ["committed", "not decided"])
def test_several_without_a_record_are_not_guessed_at(
    manager: Manager, start: Callable[..., Daemon], other: Path, decided: str
) -> None:
    """Nothing says any more which of them a change had prepared only; what to do is said, and helps."""
    first = start()
    first.wait_until("ready")
    changer = Changer(first)
    served = changer.current()
    transaction, prepared = changer.prepare(from_directory(other))
    if decided == "committed":
        changer.decide(transaction, commit=True)
    first.stop(signal.SIGKILL)
    manager.remove("state")
    for _ in range(2):  # and the keeper after that knows it, too
        reason = refused_everybody(daemon := start())
        assert {f"generation {one.generation}" in reason for one in prepared.generations} == {True}
        assert "next step: to load what --model says: `weightcached release`, then start the daemon again" in reason
        daemon.stop(signal.SIGKILL)
    refused_everybody(daemon := start())
    channel = daemon.connect()
    try:
        assert isinstance(ask(channel, Release()), Released)
    finally:
        channel.close()
    assert daemon.process.wait(TIMEOUT_S) == 0
    again = start()
    assert again.wait_until("ready").generation not in [served, *(one.generation for one in prepared.generations)]


def test_what_was_given_up_is_never_served_though_the_vault_kept_it(
    manager: Manager, start: Callable[..., Daemon], other: Path
) -> None:
    """The vault was not told, or did not hear, that a generation is dropped: the record does not know it any more."""
    first = start()
    older = str(first.wait_until("ready").generation)
    changer = Changer(first)
    transaction, prepared = changer.prepare(from_directory(other))
    assert prepared.change is not None
    given_up = str(prepared.change.generation)
    kept = {end: os.dup(manager.fd(f"g{given_up}{end}")) for end in (".s0", ".m")}
    changer.decide(transaction, commit=False)
    first.stop(signal.SIGKILL)
    for end, fd in kept.items():
        manager.add(f"g{given_up}{end}", fd)
    manager.remove(f"g{older}.s0")
    daemon = start()
    report = daemon.wait_until("ready")
    assert report.generation not in (older, given_up)
    assert {name[1:33] for name in manager.names if name.startswith("g")} == {report.generation}
