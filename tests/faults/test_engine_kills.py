"""An engine of two ranks is killed at each step of a change, of its daemons' and of its own: nothing of it is left, and
whoever comes next has one version at both ranks. And a process that makes or verifies the new weights of one rank.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.test_all_ranks import Two, two_ranks
from tests.support.checkpoints import tiny_llama
from tests.support.commanding import Changer, from_directory, other_weights, standings
from tests.support.daemons import TIMEOUT_S, Daemon
from tests.support.eventually import eventually
from tests.support.groups import Change, group, versions, waiting
from tests.support.resources import open_fds
from weightcached.client import WeightSet, attach, swap
from weightcached.client.control import resolve, update
from weightcached.protocol.channel import Channel
from weightcached.protocol.errors import WorkerDied
from weightcached.protocol.memory import host
from weightcached.protocol.messages import Switch

HELD_BY_TWO_GENERATIONS = 5
"""Descriptors of a keeper's: the state, and a manifest and a segment of each."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with two_ranks(tmp_path_factory.mktemp("engines")) as two:
        yield two


def attached(two: Two) -> list[WeightSet]:
    """Every rank of an engine, that have agreed on what rank 0 serves; one barrier for all."""
    ranks: list[WeightSet] = []
    for rank in range(len(two.ranks)):
        options: dict[str, Any] = {"layout": "fused", "tp_size": len(two.ranks), "tp_rank": rank, "mode": "require"}
        want = ranks[0].version if ranks else "current"
        ranks.append(attach(two.model, runtime_dir=two.ranks[0].place.runtime_dir, want=want, **options))
        ranks[-1].barrier = ranks[0].barrier
    return ranks


# Where an engine stops, and is killed. Each is done in its process, before it changes over.

Stop = Callable[[], None]


def _before(owner: Any, name: str, stop: Stop, *, call: int = 1) -> None:
    """At the beginning of that call of a function."""
    real, calls = getattr(owner, name), 0

    def stopped(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            stop()
        return real(*args, **options)

    setattr(owner, name, stopped)


def _asked(stop: Stop) -> None:
    real = Channel.send

    def send(self: Channel, message: Any, *args: Any, **options: Any) -> None:
        real(self, message, *args, **options)
        if isinstance(message, Switch):
            stop()

    Channel.send = send  # type: ignore[method-assign]


OWN_POINTS: dict[str, Callable[[Stop], None]] = {
    "it has asked for the new one": _asked,
    "it has the new one's descriptors": partial(_before, swap, "map_granted"),
    "it populates the first rank's": partial(_before, host.Mapping, "populate"),
    "it populates the second rank's": partial(_before, host.Mapping, "populate", call=2),
    "it has entered the barrier": partial(_before, swap.Staged, "swap"),
    "the range is a hole": partial(_before, host, "_move", call=2),
    "one rank's is swapped": partial(_before, swap.Staged, "swap", call=2),
    "both are swapped": partial(_before, WeightSet, "_now", call=2),
    "it has left the barrier": partial(_before, swap, "_retire"),
}


class Engine:
    """A forked process that has attached to both ranks, and changes over when it is told to."""

    def __init__(self, two: Two, point: str | None) -> None:
        up_r, up_w = os.pipe()
        go_r, go_w = os.pipe()
        self._up, self._go = up_r, go_w
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._live(two, point, up_w, go_r)
            finally:
                os._exit(1)  # not reached: it is killed where it stops
        os.close(up_w)
        os.close(go_r)
        self._said("attached")

    def _live(self, two: Two, point: str | None, up: int, go: int) -> None:
        def stop() -> None:
            os.write(up, b"!")
            signal.pause()

        ranks = attached(two)
        if point is not None:
            OWN_POINTS[point](stop)
        os.write(up, b"!")
        os.read(go, 1)
        first, second = ranks
        with first.stage() as one, second.stage(version=one.version) as other, first.barrier.stopped() as stopped:
            one.swap(stopped)
            other.swap(stopped)

    def _said(self, what: str) -> None:
        assert os.read(self._up, 1) == b"!", f"the engine ended before it had {what}"

    def change_over(self) -> None:
        """Until it stops at its point."""
        os.write(self._go, b"1")
        self._said("come to its point")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert os.waitpid(self.pid, 0)[1] == signal.SIGKILL
        os.close(self._up)
        os.close(self._go)


@contextmanager
def engine(two: Two, point: str | None = None) -> Iterator[Engine]:
    running = Engine(two, point)
    try:
        yield running
    finally:
        running.kill()


def leases(rank: Daemon) -> dict[str, int]:
    return {one.generation: one.leases for one in Changer(rank).state().generations if one.leases}


def is_held(rank: Daemon, expected: list[tuple[str, str]]) -> bool:
    """Whether nothing is leased, and this and nothing else is there."""
    return leases(rank) == {} and standings(Changer(rank).state()) == expected


def require_one_version(two: Two, served: list[str], before: list[str]) -> None:
    """Both serve what they should, nothing is held but what is kept for rollback, and an engine agrees."""
    assert waiting(two.ranks) == []
    assert len(set(versions(two.ranks))) == 1
    for rank, now, earlier in zip(two.ranks, served, before, strict=True):
        eventually(partial(is_held, rank, [(now, "current"), (earlier, "previous")]))
        fds = open_fds(rank.report().pid).values()
        assert sum("memfd:weightcached" in what for what in fds) == HELD_BY_TWO_GENERATIONS
    with ExitStack() as stack:
        fresh = [stack.enter_context(one) for one in attached(two)]
        assert [one.generation for one in fresh] == served
        assert len({one.receipts_version for one in fresh}) == 1
        assert [leases(rank) for rank in two.ranks] == [{one: 1} for one in served]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", ["opened", "preparing", "prepared", "committed"])
def test_an_engine_killed_while_its_daemons_change_is_gone_and_the_change_comes_about(two: Two, step: str) -> None:
    change = Change(two.ranks, from_directory(two.newer()))
    with engine(two):
        assert [leases(rank) for rank in two.ranks] == [{one: 1} for one in change.bases]
        two.reach(change, step)
    if step == "opened":
        change.prepare()
        two.in_the_middle()
    if step in ("opened", "preparing"):
        two.let_go()
    if step != "committed":
        change.prepared()
        assert change.commit().outcome == "committed"
    change.resolve()
    require_one_version(two, [one.current() for one in change.ranks], change.bases)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", OWN_POINTS)
def test_an_engine_killed_while_it_changes_over_is_gone_from_both_generations(two: Two, point: str) -> None:
    change = Change(two.ranks, from_directory(two.newer()))
    with engine(two, point) as dying:
        two.reach(change, "told")
        dying.change_over()
        served = [one.current() for one in change.ranks]
        assert served != change.bases
    require_one_version(two, served, change.bases)


@pytest.mark.timeout(300)
def test_what_only_a_killed_engine_used_is_freed(two: Two) -> None:
    with engine(two):
        used = [Changer(rank).current() for rank in two.ranks]
        for _ in range(2):
            before = [Changer(rank).current() for rank in two.ranks]
            two.reach(change := Change(two.ranks, from_directory(two.newer())), "told")
        for rank, one in zip(two.ranks, used, strict=True):
            assert one in [held for held, _ in standings(Changer(rank).state())]
    require_one_version(two, [one.current() for one in change.ranks], before)


# The processes that make a rank's new weights


@pytest.mark.timeout(300)
def test_a_process_killed_while_one_rank_makes_its_weights_fails_the_change_by_name(tmp_path: Path) -> None:
    """Worker and verifying process, of either rank, when the other one has prepared: that drops what it has."""
    model, numbers = tiny_llama(tmp_path / "model"), count(2)
    points = [tmp_path / "dies 0", tmp_path / "dies 1"]
    for path in points:
        path.touch()
    scripts = {rank: {"kill_said": str(path)} for rank, path in enumerate(points)}
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name,
        group(model, Path(name) / "run", scripts=scripts) as ranks,
    ):
        at = ranks[0].place.runtime_dir
        first, held = versions(ranks), [standings(Changer(rank).state()) for rank in ranks]
        for victim, point in product((0, 1), ("planned", "memory", "progress", "verify")):
            number = next(numbers)
            change = Change(ranks, from_directory(other_weights(model, tmp_path / str(number), number=number)))
            change.open()
            other = 1 - victim
            change.prepare(other)
            change.prepared(other)
            if point == "verify":
                seen = len(ranks[victim].log.lines)
                change.prepare(victim)
                ranks[victim].wait_logged("progress", stage="verify", first=seen)
                kill_verifying(ranks[victim])
            else:
                points[victim].write_text(point)
                change.prepare(victim)
            state = change.ranks[victim].ended(change.transaction)
            points[victim].write_text("")
            assert state.change is not None
            assert (state.change.state, state.change.error_code) == ("failed", WorkerDied.code), point
            assert "killed by SIGKILL" in str(state.change.error)
            resolve(runtime_dir=at, timeout_s=TIMEOUT_S)
            assert (versions(ranks), waiting(ranks)) == (first, [])
            assert [standings(Changer(rank).state()) for rank in ranks] == held, "what was prepared is dropped"
        points[1].write_text("memory")
        with pytest.raises(WorkerDied, match="not changed on rank tp1of2"):
            update(other_weights(model, tmp_path / "last"), runtime_dir=at)
        points[1].write_text("")
        update(tmp_path / "last", runtime_dir=at)
        assert len(set(versions(ranks))) == 1
        assert versions(ranks) != first


def kill_verifying(rank: Daemon) -> None:
    keeper, killed = psutil.Process(rank.report().pid), []

    def look() -> bool:
        for child in keeper.children():
            with suppress(psutil.NoSuchProcess):
                if "weightcached.loader.verify" in child.cmdline():
                    child.kill()
                    killed.append(child.pid)
        return bool(killed)

    eventually(look)
